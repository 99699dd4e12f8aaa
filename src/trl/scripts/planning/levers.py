"""The largest micro-batch and row that fit, and what each lever frees when it alone is pulled."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers.training_args import OptimizerNames

from trl.options.shared import RESIDUAL
from trl.scripts.planning.plan import Lever, Plan, plan_of
from trl.scripts.planning.run import Run
from trl.scripts.planning.state import sharding_of

_MOST_ROWS = 4096


def with_fits(plan: Plan, run: Run) -> Plan:
    """The plan with the largest micro-batch and the longest row that fit, each with all else as it is."""
    context = getattr(run.config, "max_position_embeddings", None) or 2**20
    batch = _largest(lambda rows: run.changed(per_device_train_batch_size=rows), run.rows, plan, _MOST_ROWS)
    length = _largest(lambda tokens: run.changed(**of_length(run, tokens)), run.lengths.row, plan, context)
    return replace(plan, largest_batch=batch, largest_length=length)


def of_length(run: Run, tokens: int) -> dict[str, int]:
    """The settings for rows of so many tokens."""
    prompt = min(run.lengths.prompt, tokens // 2)
    sampled = {"max_prompt_length": prompt, "max_completion_length": max(1, tokens - prompt)}
    return sampled if run.samples else {"max_length": tokens}


def as_words(settings: Mapping[str, object]) -> list[str]:
    """Settings as they are written on a command line."""
    words: list[str] = []
    for name, value in settings.items():
        values = value if isinstance(value, (list, tuple)) else [getattr(value, "value", value)]
        words += [f"--{name}", *(str(item).lower() if isinstance(item, bool) else str(item) for item in values)]
    return words


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


class Change(NamedTuple):
    """A lever: its settings, whether it can be pulled, and settings that follow from it."""

    name: str
    settings: dict[str, Any]
    is_possible: object = True
    follows: Mapping[str, object] = MappingProxyType({})
    same_batches: bool = False  # micro-batches take what they took


def levers_of(plan: Plan, run: Run) -> list[Lever]:
    """What each lever frees, the most first; those below 0.5 % of the peak are left out."""
    levers = [Lever(name, setting, plan.peak - plan_of(other).peak) for name, setting, other in _changed(run)]
    return sorted((lever for lever in levers if lever.frees >= 0.005 * plan.peak), key=lambda lever: -lever.frees)


def _changed(run: Run) -> Iterator[tuple[str, str, Run]]:
    """Levers with their settings as words, and the run with each alone."""
    args, model, deepspeed = run.args, run.model_args, run.sharding.is_deepspeed
    fewer = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": run.rows * args.gradient_accumulation_steps
    }  # fmt: skip
    offloads, in_advance = "activation_offloading", "precompute_ref_log_probs"
    has_bits = find_spec("bitsandbytes") and "bit" not in run.optimizer and not deepspeed
    lora = {"use_peft": True, "lora_target_modules": model.lora_target_modules or "all-linear"}
    has_lora = find_spec("peft") is not None and not (model.load_in_4bit or model.load_in_8bit)
    can_round = not (args.weights or model.use_peft or deepspeed)
    for change in (
        Change("smaller micro-batches", fewer, run.rows > 1),
        Change("rows of half the length", of_length(run, run.lengths.row // 2)),
        Change("gradient checkpointing", {"gradient_checkpointing": True}, not args.gradient_checkpointing),
        Change(
            "activations in CPU memory", {offloads: True}, getattr(args, offloads, None) is False and not args.use_cpu
        ),
        Change("bfloat16 weights", {"weights": RESIDUAL}, can_round, {"bf16": False}),
        Change("8-bit optimiser", {"optim": OptimizerNames.ADAMW_8BIT}, has_bits, same_batches=True),
        Change("reference in advance", {in_advance: True}, getattr(args, in_advance, None) is False, same_batches=True),
        Change("LoRA", lora, has_lora and not model.use_peft, {"weights": None}),
        Change("LoRA on 4 bits", {"load_in_4bit": True, **lora}, has_lora, {"weights": None}),
    ):
        if change.is_possible:
            other = run.changed(**change.settings, **change.follows)
            other = replace(other, phases=run.phases) if change.same_batches else other
            yield change.name, " ".join(as_words(change.settings)), other
    devices = run.sharding.devices
    for profile in ("zero2", "fsdp2", "zero3") if devices > 1 else ():
        sharding = sharding_of(profile, devices, half=bool(args.bf16))
        if sharding != run.sharding and not (profile != "fsdp2" and args.weights):
            yield sharding.name, f"--accelerate_config {profile}", replace(run, sharding=sharding)
