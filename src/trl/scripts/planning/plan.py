"""The plan of a run: bytes of each device at the peak, what fits, and what each lever frees."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.training_args import OptimizerNames

from trl.models.packed.small_copy import keep_layers
from trl.models.scoring.causal import Scorer
from trl.models.scoring.classifier import ClassificationScorer
from trl.scripts.planning import measure
from trl.scripts.planning.batches import Lengths, Planned, lengths_of, planned_of
from trl.scripts.planning.policy import PolicyBytes, build, meta_model, policy_bytes, saved_dtype
from trl.scripts.planning.state import Sharding, make_optimizer, optimizer_bytes, tensor_bytes

if TYPE_CHECKING:
    from trl.options.model import ModelConfig
    from trl.scripts.arguments import AnyConfig


# DeepSpeed's defaults (0.19), in numbers: `reduce_bucket_size` and `stage3_max_live_parameters`.
_BUCKET, _LIVE = 5e8, 1e9


@dataclass(frozen=True)
class Run:
    """What decides the memory of a run."""

    method: str
    config: PretrainedConfig
    args: "AnyConfig"
    model_args: "ModelConfig"
    sharding: Sharding
    frozen: Mapping[str, PretrainedConfig] = field(default_factory=dict)  # other models, by what they are
    memory: float | None = None  # of a device

    @cached_property
    def lengths(self) -> Lengths:
        """Of the longest row."""
        context = getattr(self.config, "max_position_embeddings", None)
        return lengths_of(self.args, context, samples=self.planned.samples)

    @cached_property
    def planned(self) -> Planned:
        """What is known of the method with these settings."""
        return planned_of(self.method, self.args)

    @property
    def optimizer(self) -> str:
        """The name of the optimiser."""
        return str(getattr(self.args.optim, "value", self.args.optim))

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.args.per_device_train_batch_size

    @property
    def rollouts(self) -> measure.Rollouts | None:
        """What a device generates at once; None where nothing is, or another process does."""
        args: Any = self.args
        if getattr(args, "lmbda", 0):
            rows = self.rows * args.gradient_accumulation_steps
            return measure.Rollouts(rows, rows, *self.lengths)
        if not self.planned.samples or args.use_vllm:
            return None
        rows = args.generation_batch_size // args.world_size
        opponents, prompts = self.planned.opponents, -(-rows // args.num_generations)
        return measure.Rollouts(rows // 2 if opponents else rows, prompts, *self.lengths, opponents or 1)

    @property
    def vllm(self) -> float:
        """The share of a device's memory that vLLM takes in the same process."""
        args: Any = self.args
        colocated = getattr(args, "use_vllm", False) and args.vllm_mode == "colocate"
        return args.vllm_gpu_memory_utilization if colocated else 0.0

    @property
    def sums_whole(self) -> bool:
        """Whether the gradients of several micro-batches are summed before FSDP shares them: accelerate's default."""
        settings = getattr(self.args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
        is_several = self.args.gradient_accumulation_steps > 1 and not settings.get("sync_each_batch")
        return is_several and self.sharding.name.startswith("FSDP")

    def _without_bits(self) -> "AnyConfig":
        """The settings with an optimiser of PyTorch in place of one of bitsandbytes, which needs numbers."""
        return self.changed(optim=OptimizerNames.ADAMW_TORCH_FUSED).args if "bit" in self.optimizer else self.args

    def changed(self, *, of_model: Mapping[str, object] = {}, **of_args: object) -> "Run":
        """The run with other settings, which are not checked."""
        args, model_args = copy.copy(self.args), copy.copy(self.model_args)
        for target, settings in ((args, of_args), (model_args, of_model)):
            for name, value in settings.items():
                setattr(target, name, value)
        return replace(self, args=args, model_args=model_args)

    def with_phases_of(self, other: "Run") -> "Run":
        """The other run, whose micro-batches are measured already if they are this one's."""
        if other.sharding.half == self.sharding.half:
            vars(other)["phases"] = self.phases
        return other

    @cached_property
    def policy(self) -> PolicyBytes:
        """The weights of the policy."""
        model = build(self.config, self.args, self.model_args, self.planned.classifier)
        return policy_bytes(model, self.model_args, half=self.sharding.half)

    def _build(self, config: PretrainedConfig) -> nn.Module:
        """A policy with the weights that are computed with."""
        model = build(config, self.args, self.model_args, self.planned.classifier)
        for parameter in model.parameters() if self.sharding.half else ():
            parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def _teacher(self) -> nn.Module | int | None:
        """A short copy of the teacher: without gradients one layer's activations are there at a time."""
        config, args = self.frozen.get("teacher"), self.args
        if config is None:
            return getattr(args, "teacher_top_k", 0) if getattr(args, "teacher_model_server_url", None) else None
        return meta_model(keep_layers(config, [0]), saved_dtype(config))

    @cached_property
    def phases(self) -> dict[str, measure.Bytes]:
        """The phases of a micro-batch, measured."""
        planned, args = self.planned, self.args
        checkpointing = (args.gradient_checkpointing_kwargs or {}) if args.gradient_checkpointing else None
        probe = measure.Probe(
            self._build, planned.method, lambda scorer: planned.batch(args, self.rows, self.lengths, scorer),
            scorer=Scorer if planned.classifier is None else ClassificationScorer,
            teach=self._teacher if hasattr(args, "teacher_top_k") else None, checkpointing=checkpointing,
            optimizer=lambda parameters: make_optimizer(self._without_bits(), parameters),
            rollouts=self.rollouts, half=bool(args.bf16), on_cpu=bool(args.use_cpu),
            is_second=args.gradient_accumulation_steps > 1,
            offloads=bool(getattr(args, "activation_offloading", False)) and not args.use_cpu,
        )  # fmt: skip
        return measure.measured(probe, self.config)


class Lever(NamedTuple):
    """A change of one setting, and the bytes of a device that it frees."""

    name: str
    setting: str
    frees: float


@dataclass(frozen=True)
class Plan:
    """The memory of a run on each device, in bytes.

    `parts` at the peak add up to `peak`, which is in `phase`, the largest of `phases`. `largest_batch` and
    `largest_length`: the largest micro-batch (rows) and row (tokens) that fit in `memory`, each with all else as it is;
    None without a memory.
    """

    method: str
    weights: int
    rows: int
    lengths: Lengths
    sharding: Sharding
    parts: dict[str, float]
    phases: Mapping[str, float]
    gradients: float  # all of them, after the backward pass
    on_host: float = 0.0
    memory: float | None = None
    largest_batch: int | None = None
    largest_length: int | None = None
    levers: Sequence[Lever] = ()

    @property
    def phase(self) -> str:
        """The phase with the highest sum."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def state(self) -> float:
        """Weights, all gradients and the optimiser's state: what no smaller batch frees."""
        return self.phases.get(measure.UPDATE, self.peak)

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits in the memory; None without one."""
        return None if self.memory is None else self.peak <= self.memory


def plan_of(run: Run) -> Plan:
    """The plan of a run without what fits and without levers."""
    sharding, policy = run.sharding, run.policy
    trained = tensor_bytes(policy.trained)
    state: float = optimizer_bytes(run.args, policy.trained)
    weights, gradients = policy.kept, float(trained)
    numbers = sum(parameter.numel() for parameter in policy.trained)
    if sharding.half and sharding.is_deepspeed:  # it trains bfloat16 weights, and its optimiser float32 copies
        weights, gradients = weights - trained + 2 * numbers, 2.0 * numbers
        state = state * 4 * numbers / trained + 4 * numbers
    residuals = " with bf16 residuals" if getattr(run.args, "weights", None) else ""
    parts = {
        "weights": sharding.part(weights, shared=sharding.weights),
        "gradients": sharding.part(gradients, shared=sharding.gradients),
        f"optimiser ({run.optimizer}{residuals})": sharding.part(state, shared=sharding.optimizer),
    }
    on_host = 0.0
    for number, name in enumerate(parts):
        if sharding.offloads_weights or (sharding.offloads_optimizer and number == 2):
            on_host += parts[name]
            parts[name] = 0.0
    for name, size in frozen_bytes(run).items():
        parts[name] = sharding.part(size, shared=sharding.weights)
    if sharding.buckets:
        parts["DDP's buckets"] = gradients
    if sharding.is_deepspeed:
        parts["DeepSpeed's bucket"] = policy.whole.gradients * min(1.0, _BUCKET / max(1, numbers))
    return _with_phases(run, parts, on_host)


def _with_phases(run: Run, parts: dict[str, float], on_host: float) -> Plan:
    """With the phase in which the sum is largest, where not all gradients are there yet."""
    sharding, policy, all_gradients, sizes = run.sharding, run.policy, parts["gradients"], dict[str, Sequence[float]]()
    gathered = gathered_bytes(run) if sharding.weights else {}
    phases = {**run.phases, **({measure.GENERATION: measure.Bytes(0, 0)} if run.vllm else {})}
    sleeps, of_vllm = getattr(run.args, "vllm_enable_sleep_mode", False), run.vllm * (run.memory or 0)
    for name, peak in phases.items():
        is_update = name == measure.UPDATE
        share = 1 if run.sums_whole and not is_update else all_gradients / (policy.whole.gradients or 1)
        activations = sharding.part(peak.activations, shared=sharding.optimizer and is_update) + policy.largest
        engine = 0.0 if sleeps and name != measure.GENERATION else of_vllm
        sizes[name] = (peak.gradients * share, gathered.get(name, 0.0), activations, engine)
    fixed = sum(parts.values()) - all_gradients
    plan = Plan(
        run.method, policy.count, run.rows, run.lengths, sharding, parts,
        {name: fixed + sum(size) for name, size in sizes.items()}, all_gradients, on_host, run.memory,
    )  # fmt: skip
    names = ("gradients", "gathered units", "activations and logits", f"vLLM ({run.vllm:.0%} of the GPU)")
    parts |= {name: size for name, size in zip(names, sizes[plan.phase], strict=True) if size or name in names[::2]}
    return plan


def gathered_bytes(run: Run) -> dict[str, float]:
    """The units that are whole in each phase where weights are shared, their gradients, and buffers.

    FSDP2 (torch 2.13) gathers the next unit into a buffer while one computes, and copies it out; gradients go into
    another buffer, which is reduced while those of the next unit are computed. Generation gathers all.
    """
    whole, layer, embedding, head = run.policy.whole, run.policy.layer, run.policy.embedding, run.policy.head
    generation = {} if run.vllm else {measure.GENERATION: whole.weights}
    if run.sharding.is_deepspeed:
        live = whole.weights * min(1.0, _LIVE / run.policy.count)
        phases = (measure.FORWARD, measure.HEAD, measure.LAST_LAYER, measure.FIRST_LAYER)
        return {**dict.fromkeys(phases, live), **generation}
    return {
        **generation,
        measure.FORWARD: max(3 * layer.weights, 2 * embedding.weights),
        measure.HEAD: 2 * head.weights,
        measure.LAST_LAYER: 2 * layer.weights + layer.gradients + head.gradients,
        measure.FIRST_LAYER: 2 * max(sum(layer), embedding.gradients),
    }


def frozen_bytes(run: Run) -> dict[str, float]:
    """Weights of the reference and of other models beside the policy."""
    args, planned, sizes = run.args, run.planned, dict[str, float]()
    is_off = getattr(args, "precompute_ref_log_probs", False) or (planned.samples and getattr(args, "beta", 1.0) == 0)
    if planned.has_reference and not (is_off or run.model_args.use_peft or "reference" in run.frozen):
        sizes["reference"] = run.policy.kept
    for name, config in run.frozen.items():
        sizes[name] = tensor_bytes(meta_model(config, saved_dtype(config)).parameters())
    return sizes


def memory_of(text: str) -> float:
    """Bytes of a text such as 80GB or 24 GiB. Raises: ValueError for others."""
    units = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b", text.strip().lower())
    if match is None:
        raise ValueError(f"memory must be a number with a unit (80GB, 24GiB), got {text!r}. Write the unit too.")
    return float(match[1]) * (1024 if match[3] else 1000) ** units[match[2]]
