"""The largest micro-batch and row that fit, and what each lever frees when it alone is pulled."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec

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


def levers_of(plan: Plan, run: Run) -> list[Lever]:
    """What each lever frees, the most first; those below 0.5 % of the peak are left out."""
    levers = [Lever(name, setting, plan.peak - plan_of(other).peak) for name, setting, other in _changed(run)]
    return sorted((lever for lever in levers if lever.frees >= 0.005 * plan.peak), key=lambda lever: -lever.frees)


def _changed(run: Run) -> Iterator[tuple[str, str, Run]]:
    """The levers that can be pulled with their settings as words, and the run with each alone."""
    args, model, deepspeed = run.args, run.model_args, run.sharding.is_deepspeed
    lora = {"use_peft": True, "lora_target_modules": model.lora_target_modules or "all-linear"}
    has_lora = find_spec("peft") is not None and not model.load_in_4bit
    has_bits = find_spec("bitsandbytes") is not None and "bit" not in run.optimizer and not deepspeed
    fewer = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": run.rows * args.gradient_accumulation_steps
    }  # fmt: skip
    levers: dict[str, dict[str, object] | bool] = {
        "smaller micro-batches": run.rows > 1 and fewer,
        "rows of half the length": {**of_length(run, run.lengths.row // 2)},
        "gradient checkpointing": not args.gradient_checkpointing and {"gradient_checkpointing": True},
        "bfloat16 weights": not (args.weights or model.use_peft or deepspeed) and {"weights": RESIDUAL},
        "8-bit optimiser": has_bits and {"optim": OptimizerNames.ADAMW_8BIT},
        "reference in advance": getattr(args, "precompute_ref_log_probs", None) is False
        and {"precompute_ref_log_probs": True},
        "LoRA": has_lora and not model.use_peft and lora,
        "LoRA on 4 bits": has_lora and {"load_in_4bit": True, **lora},
    }
    for name, settings in levers.items():
        if isinstance(settings, dict):
            follows = {"bf16": False} if "weights" in settings else {"weights": None} if "use_peft" in settings else {}
            yield name, " ".join(as_words(settings)), run.changed(**settings, **follows)
    devices = run.sharding.devices
    for profile in ("zero2", "fsdp2", "zero3") if devices > 1 else ():
        sharding = sharding_of(profile, devices, half=bool(args.bf16))
        if sharding != run.sharding and not (profile != "fsdp2" and args.weights):
            yield sharding.name, f"--accelerate_config {profile}", replace(run, sharding=sharding)
