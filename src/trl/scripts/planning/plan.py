"""The plan of a run: bytes of each device at the peak, what fits, and what each lever frees."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trl.scripts.planning.live_bytes import Bytes
from trl.scripts.planning.measure import FIRST_LAYER, FORWARD, GENERATION, HEAD, LAST_LAYER, UPDATE, phases_of
from trl.scripts.planning.run import Lengths, Run, meta_model, saved_dtype
from trl.scripts.planning.state import Sharding, optimizer_bytes, tensor_bytes

# DeepSpeed's defaults (0.19), in numbers: `reduce_bucket_size` and `stage3_max_live_parameters`.
_BUCKET, _LIVE = 5e8, 1e9


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
    def state(self) -> float:
        """Weights, all gradients and the optimiser's state: what no smaller batch frees."""
        return self.phases.get(UPDATE, self.peak)

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits in the memory; None without one."""
        return None if self.memory is None else self.peak <= self.memory


def plan_of(run: Run) -> Plan:
    """The plan of a run without what fits and without levers."""
    sharding, policy, stays, gathered = run.sharding, run.policy, staying(run), gathered_bytes(run)
    share, parts = stays["gradients"] / (policy.whole.gradients or 1), dict[str, dict[str, float]]()
    for name, peak in {**phases_of(run), **({GENERATION: Bytes(0, 0)} if run.vllm else {})}.items():
        is_update, sleeps = name == UPDATE, getattr(run.args, "vllm_enable_sleep_mode", False) and name != GENERATION
        parts[name] = {
            **stays,
            "gradients": peak.gradients * (1 if run.sums_whole and not is_update else share),
            **({"gathered units": gathered[name]} if name in gathered else {}),
            "activations and logits": (sharding.share(peak.others, 1) if is_update else peak.others) + policy.largest,
            **({f"vLLM ({run.vllm:.0%} of the GPU)": run.vllm * (run.memory or 0)} if run.vllm and not sleeps else {}),
        }
    phases = {name: sum(sizes.values()) for name, sizes in parts.items()}
    largest = parts[max(phases, key=lambda name: phases[name])]
    return Plan(
        run.method, policy.count, run.rows, run.lengths, sharding, largest, phases, stays["gradients"], run.memory
    )


def staying(run: Run) -> dict[str, float]:
    """What stays through the run: state, other models, and buffers for the exchange of gradients."""
    sharding, policy, share = run.sharding, run.policy, run.sharding.share
    trained, numbers = tensor_bytes(policy.trained), sum(parameter.numel() for parameter in policy.trained)
    state, weights, gradients = float(optimizer_bytes(run.args, policy.trained)), policy.kept, float(trained)
    if sharding.half and sharding.is_deepspeed:  # it trains bfloat16 weights, and its optimiser float32 copies
        weights, gradients = weights - trained + 2 * numbers, 2.0 * numbers
        state = state * 4 * numbers / trained + 4 * numbers
    residuals = " with bf16 residuals" if getattr(run.args, "weights", None) else ""
    parts = {
        "weights": share(weights, 3),
        "gradients": share(gradients, 2),
        f"optimiser ({run.optimizer}{residuals})": share(state, 1),
    }
    is_off = run.samples and getattr(run.args, "beta", 1.0) == 0
    is_off = is_off or getattr(run.args, "precompute_ref_log_probs", False)
    has_reference = run.loss.scores_reference if run.samples else bool(run.loss.reference_names)
    if has_reference and not (is_off or run.model_args.use_peft or "reference" in run.frozen):
        parts["reference"] = share(policy.kept, 3)
    for name, config in run.frozen.items():
        parts[name] = share(tensor_bytes(meta_model(config, saved_dtype(config)).parameters()), 3)
    if sharding.name == "DDP":
        parts["DDP's buckets"] = gradients
    if sharding.is_deepspeed:
        parts["DeepSpeed's bucket"] = policy.whole.gradients * min(1.0, _BUCKET / max(1, numbers))
    return parts


def gathered_bytes(run: Run) -> dict[str, float]:
    """The units that are whole in each phase where weights are shared, their gradients, and buffers.

    FSDP2 (torch 2.13) gathers the next unit into a buffer while one computes, and copies it out; gradients go into
    another buffer, which is reduced while those of the next unit are computed. Generation gathers all.
    """
    whole, layer, embedding, head = run.policy.whole, run.policy.layer, run.policy.embedding, run.policy.head
    if run.sharding.stage < 3:  # one device copies, too
        return {}
    units = {
        FORWARD: max(3 * layer.weights, 2 * embedding.weights),
        HEAD: 2 * head.weights,
        LAST_LAYER: 2 * layer.weights + layer.gradients + head.gradients,
        FIRST_LAYER: 2 * max(sum(layer), embedding.gradients),
    }
    if run.sharding.is_deepspeed:
        units = dict.fromkeys(units, whole.weights * min(1.0, _LIVE / run.policy.count))
    return units if run.vllm else {**units, GENERATION: whole.weights}


def memory_of(text: str) -> float:
    """Bytes of a text such as 80GB or 24 GiB. Raises: ValueError for others."""
    units = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b", text.strip().lower())
    if match is None:
        raise ValueError(f"memory must be a number with a unit (80GB, 24GiB), got {text!r}. Write the unit too.")
    return float(match[1]) * (1024 if match[3] else 1000) ** units[match[2]]
