"""The plan of a run: bytes of each device at the peak, what fits, and what each lever frees when it alone is pulled."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor
from transformers.training_args import OptimizerNames

from trl.models.parts import layers_of
from trl.models.residuals import copied_bytes
from trl.models.scoring.values import PolicyAndValue
from trl.options.shared import RESIDUAL
from trl.scripts.planning.live_bytes import Bytes
from trl.scripts.planning.measure import FIRST_LAYER, FORWARD, GENERATION, HEAD, LAST_LAYER, phases_of
from trl.scripts.planning.run import Lengths, Run, core_of, meta_model, saved_dtype
from trl.scripts.planning.state import Sharding, optimizer_bytes, sharding_of, tensor_bytes

logger = logging.getLogger(__name__)

# DeepSpeed's defaults (0.19), in numbers: `reduce_bucket_size` and `stage3_max_live_parameters`.
_BUCKET, _LIVE = 5e8, 1e9
_MOST_ROWS = 4096
UPDATE = "optimiser step"


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
    parts: Mapping[str, float]
    phases: Mapping[str, float]
    gradients: float  # all of them, after the backward pass
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
    def fits(self) -> bool | None:
        """Whether the peak fits in the memory; None without one."""
        return None if self.memory is None else self.peak <= self.memory


def plan_of(run: Run) -> Plan:
    """The plan of a run without what fits and without levers."""
    stays, gathered, parts = staying(run), gathered_bytes(run), dict[str, dict[str, float]]()
    phases = dict(phases_of(run))
    if getattr(run.args, "weights", None):
        phases[UPDATE] = Bytes(tensor_bytes(run.trained), run.sharding.share(copied_bytes(run.trained), 3))
    if run.vllm:
        phases[GENERATION] = Bytes(0, 0)
    share = stays["gradients"] / (run.computed(run.trained) or 1)
    sums_whole = run.args.gradient_accumulation_steps > 1 and run.sharding.name.startswith("FSDP")
    dense = max((weight.nbytes for weight, size in run.kept.items() if size < weight.nbytes), default=0)
    sleeps = getattr(run.args, "vllm_enable_sleep_mode", False)
    for name, peak in phases.items():
        sizes = {**stays, "gradients": peak.gradients * (1 if sums_whole and name != UPDATE else share)}
        if name in gathered:
            sizes["gathered units"] = gathered[name]
        sizes["activations and logits"] = dense + peak.others
        if run.vllm and (name == GENERATION or not sleeps):
            sizes[f"vLLM ({run.vllm:.0%} of the GPU)"] = run.vllm * (run.memory or 0)
        parts[name] = sizes
    sums = {name: sum(sizes.values()) for name, sizes in parts.items()}
    largest, count = max(sums, key=lambda name: sums[name]), sum(weight.numel() for weight in run.kept)
    return Plan(
        run.method, count, run.rows, run.lengths, run.sharding, parts[largest], sums, stays["gradients"], run.memory
    )


def staying(run: Run) -> dict[str, float]:
    """What stays through the run: state, other models, and buffers for the exchange of gradients."""
    sharding, share, computed = run.sharding, run.sharding.share, run.computed(run.trained)
    size, numbers = tensor_bytes(run.trained), sum(weight.numel() for weight in run.trained)
    policy = sum(run.kept.values()) + tensor_bytes(run.model.buffers())
    value = [*run.model.value_model.parameters()] if isinstance(run.model, PolicyAndValue) else []
    weights, gradients, state = policy, float(size), float(optimizer_bytes(run.args, run.trained))
    if sharding.half and sharding.is_deepspeed:  # it trains bfloat16 weights, and its optimiser float32 copies
        weights, gradients, state = policy - size + computed, computed, (state / size + 1) * 4 * numbers
    residuals = " with bf16 residuals" if getattr(run.args, "weights", None) else ""
    of_value = run.computed(value) if sharding.is_deepspeed else sum(run.kept[weight] for weight in value)
    parts = {
        "weights": share(weights - of_value, 3),
        **({"value model": share(of_value, 3)} if value else {}),
        "gradients": share(gradients, 2),
        f"optimiser ({run.args.optim.value}{residuals})": share(state, 1),
    }
    is_off = run.samples and getattr(run.args, "beta", 1.0) == 0
    is_off = is_off or getattr(run.args, "precompute_ref_log_probs", False)
    has_reference = run.loss.scores_reference if run.samples else bool(run.loss.reference_names)
    if has_reference and not (is_off or run.model_args.use_peft or "reference" in run.frozen):
        parts["reference"] = share(policy - sum(run.kept[weight] for weight in value), 3)
    for name, config in run.frozen.items():
        parts[name] = share(tensor_bytes(meta_model(config, saved_dtype(config)).parameters()), 3)
    if sharding.name == "DDP":
        parts["DDP's buckets"] = gradients
    if sharding.is_deepspeed:
        parts["DeepSpeed's bucket"] = computed * min(1.0, _BUCKET / max(1, numbers))
    return parts


def gathered_bytes(run: Run) -> dict[str, float]:
    """The units that are whole in each phase where weights are shared, their gradients, and buffers.

    FSDP2 (torch 2.13) gathers the next unit into a buffer while one computes, and copies it out; gradients go into
    another buffer, which is reduced while those of the next unit are computed. Generation gathers all.
    """
    if run.sharding.stage < 3:  # one device copies, too
        return {}
    core, whole, trained = core_of(run.model), run.computed(run.kept), {*run.trained}
    layers = [{*layer.parameters()} for layer in layers_of(core) or ()]
    layer = max(layers, key=run.computed, default=set[Tensor]())
    embedding, output = {*core.get_input_embeddings().parameters()}, core.get_output_embeddings()
    head = {*core.parameters()}.difference(*layers)  # with the last norm
    if output is None or output.weight not in embedding:
        head -= embedding
    units = {
        FORWARD: max(3 * run.computed(layer), 2 * run.computed(embedding)),
        HEAD: 2 * run.computed(head),
        LAST_LAYER: 2 * run.computed(layer) + run.computed((layer | head) & trained),
        FIRST_LAYER: 2 * max(run.computed(layer) + run.computed(layer & trained), run.computed(embedding & trained)),
    }
    if run.sharding.is_deepspeed:
        units = dict.fromkeys(units, whole * min(1.0, _LIVE / sum(weight.numel() for weight in run.kept)))
    return units if run.vllm else {**units, GENERATION: whole}


def planned(run: Run, *, levers: bool) -> Plan:
    """The plan of a run, with the largest micro-batch and row that fit in its memory, each with all else as it is."""
    plan, context = plan_of(run), getattr(run.config, "max_position_embeddings", None) or 2**20
    if run.lengths.row > context:
        logger.warning(
            "rows of %d tokens are longer than max_position_embeddings=%d of the model. Lower their length.",
            run.lengths.row, context,
        )  # fmt: skip
    if run.memory is not None:
        batch = _largest(lambda rows: run.changed(per_device_train_batch_size=rows), run.rows, plan, _MOST_ROWS)
        length = _largest(lambda tokens: run.changed(**of_length(run, tokens)), run.lengths.row, plan, context)
        plan = replace(plan, largest_batch=batch, largest_length=length)
    return replace(plan, levers=levers_of(plan, run)) if levers else plan


def of_length(run: Run, tokens: int) -> dict[str, int]:
    """The settings for rows of so many tokens."""
    prompt = min(run.lengths.prompt, tokens // 2)
    sampled = {"max_prompt_length": prompt, "max_completion_length": max(1, tokens - prompt)}
    if run.method == "ppo":  # prompts are as long as responses
        sampled = {"response_length": max(1, tokens // 2)}
    return sampled if run.samples else {"max_length": tokens}


def _largest(changed: Callable[[int], Run], now: int, plan: Plan, most: int) -> int:
    """The largest number that fits, 0 if none does: phases lie on lines, which are measured again near the answer."""
    other, memory = now // 2 if now > 1 else 2, plan.memory or 0.0
    sizes, others = plan.phases, plan_of(changed(other)).phases

    def crossing() -> int:
        """The number at which the first phase fills the memory."""
        slopes = {name: (others[name] - size) / (other - now) for name, size in sizes.items()}
        places = (
            now + (memory - size) / slopes[name] if slopes[name] > 0 else most * (size <= memory)
            for name, size in sizes.items()
        )
        return max(0, int(min(most, *places)))

    near = max(1, min(number := crossing(), 2 * now))
    if near in (now, other):
        return number
    now, sizes, other, others = near, plan_of(changed(near)).phases, now, sizes
    return number if near == number and max(sizes.values()) <= memory else crossing()


def levers_of(plan: Plan, run: Run) -> list[Lever]:
    """What each lever frees, the most first; those below 0.5 % of the peak are left out."""
    levers = [Lever(name, setting, plan.peak - plan_of(other).peak) for name, setting, other in _changed(run)]
    return sorted((lever for lever in levers if lever.frees >= 0.005 * plan.peak), key=lambda lever: -lever.frees)


def _changed(run: Run) -> Iterator[tuple[str, str, Run]]:
    """The levers that can be pulled with their settings as words, and the run with each alone."""
    args, model, deepspeed = run.args, run.model_args, run.sharding.is_deepspeed
    lora = {"use_peft": True, **({} if model.lora_target_modules else {"lora_target_modules": "all-linear"})}
    has_lora = find_spec("peft") is not None and not model.load_in_4bit
    has_bits = find_spec("bitsandbytes") is not None and "bit" not in args.optim.value and not deepspeed
    has_reference = getattr(args, "precompute_ref_log_probs", None) is False
    steps = {"gradient_accumulation_steps": run.rows * args.gradient_accumulation_steps}
    levers = [
        ("smaller micro-batches", run.rows > 1, {"per_device_train_batch_size": 1, **steps}),
        ("rows of half the length", True, of_length(run, run.lengths.row // 2)),
        ("gradient checkpointing", not args.gradient_checkpointing, {"gradient_checkpointing": True}),
        ("bfloat16 weights", not (args.weights or model.use_peft or deepspeed), {"weights": RESIDUAL}),
        ("8-bit optimiser", has_bits, {"optim": OptimizerNames.ADAMW_8BIT}),
        ("reference in advance", has_reference, {"precompute_ref_log_probs": True}),
        ("LoRA", has_lora and not model.use_peft, lora),
        ("LoRA on 4 bits", has_lora, {"load_in_4bit": True, **lora}),
    ]
    for name, _, settings in filter(itemgetter(1), levers):
        follows = {"bf16": False} if "weights" in settings else {"weights": None} if "use_peft" in settings else {}
        words = (f"--{key} {str(getattr(value, 'value', value)).lower()}" for key, value in settings.items())
        yield name, " ".join(words), run.changed(**settings, **follows)
    devices = run.sharding.devices
    for profile in ("zero2", "fsdp2", "zero3") if devices > 1 else ():
        sharding = sharding_of(profile, devices, half=bool(args.bf16))
        if sharding != run.sharding and not (profile != "fsdp2" and args.weights):
            yield sharding.name, f"--accelerate_config {profile}", replace(run, sharding=sharding)
