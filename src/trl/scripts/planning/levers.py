"""The largest micro-batch and row that fit, and what each lever frees when it alone is pulled."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from transformers.training_args import OptimizerNames

from trl.options.shared import RESIDUAL
from trl.scripts.planning.plan import Lever, Plan, Run, plan_of
from trl.scripts.planning.state import sharding_of

_MOST_ROWS = 4096


def with_fits(plan: Plan, run: Run) -> Plan:
    """The plan with the largest micro-batch and the longest row that fit, each with all else as it is."""
    context = getattr(run.config, "max_position_embeddings", None) or 2**20
    batch = _largest(lambda rows: run.changed(per_device_train_batch_size=rows), run.rows, plan, _MOST_ROWS)
    length = _largest(lambda tokens: with_length(run, tokens), run.lengths.row, plan, context)
    return replace(plan, largest_batch=batch, largest_length=length)


def with_length(run: Run, tokens: int) -> Run:
    """The run with rows of so many tokens; completions change where the policy samples them."""
    if run.planned.samples:
        prompt = min(run.lengths.prompt, tokens // 2)
        return run.changed(max_prompt_length=prompt, max_completion_length=max(1, tokens - prompt))
    return run.changed(max_length=tokens)


def _largest(changed: Callable[[int], Run], now: int, plan: Plan, most: int) -> int:
    """The largest number that fits, 0 if none does: phases lie on lines, which are measured twice, near the answer."""
    other, memory = now // 2 if now > 1 else 2, plan.memory or 0.0
    sizes, others = plan.phases, plan_of(changed(other)).phases
    for _ in range(2):
        number = max(0, int(min(_crossing(now, sizes[name], other, others[name], memory, most) for name in sizes)))
        near = max(1, min(number, 2 * now))
        if near in (now, other):
            break
        now, sizes, other, others = near, plan_of(changed(near)).phases, now, sizes
        if near == number and max(sizes.values()) <= memory:
            break
    return number


def _crossing(now: int, size: float, other: int, other_size: float, memory: float, most: int) -> float:
    """The number at which a phase fills the memory."""
    slope = (other_size - size) / (other - now)
    return min(most, now + (memory - size) / slope) if slope > 0 else most * (size <= memory)


def levers_of(plan: Plan, run: Run) -> list[Lever]:
    """What each lever frees, the most first; those below 0.5 % of the peak are left out."""
    levers = [Lever(name, setting, plan.peak - plan_of(other).peak) for name, setting, other in _changes(run)]
    return sorted((lever for lever in levers if lever.frees >= 0.005 * plan.peak), key=lambda lever: -lever.frees)


def _changes(run: Run) -> Iterator[tuple[str, str, Run]]:
    args: Any = run.args
    model, deepspeed = run.model_args, run.sharding.is_deepspeed
    if run.rows > 1:
        steps = run.rows * args.gradient_accumulation_steps
        smaller = run.changed(per_device_train_batch_size=1, gradient_accumulation_steps=steps)
        setting = f"--per_device_train_batch_size 1 --gradient_accumulation_steps {steps}"
        yield "smaller micro-batches", setting, smaller
    half = with_length(run, run.lengths.row // 2)
    limit = "max_completion_length" if run.planned.samples else "max_length"
    yield "rows of half the length", f"--{limit} {getattr(half.args, limit)}", half
    if not args.gradient_checkpointing:
        yield "gradient checkpointing", "--gradient_checkpointing true", run.changed(gradient_checkpointing=True)
    if getattr(args, "activation_offloading", None) is False and not args.use_cpu:
        yield "activations in CPU memory", "--activation_offloading true", run.changed(activation_offloading=True)
    if args.weights is None and not model.use_peft and not deepspeed:
        yield "bfloat16 weights", f"--weights {RESIDUAL}", run.changed(weights=RESIDUAL, bf16=False)
    if find_spec("bitsandbytes") and "bit" not in run.optimizer and not deepspeed:
        yield "8-bit optimiser", "--optim adamw_8bit", run.with_phases_of(run.changed(optim=OptimizerNames.ADAMW_8BIT))
    if getattr(args, "precompute_ref_log_probs", None) is False:
        before = run.with_phases_of(run.changed(precompute_ref_log_probs=True))
        yield "reference in advance", "--precompute_ref_log_probs true", before
    if find_spec("peft") and not (model.load_in_4bit or model.load_in_8bit):
        lora = {"use_peft": True, "lora_target_modules": model.lora_target_modules or "all-linear"}
        setting = "--use_peft true --lora_target_modules all-linear"
        if not model.use_peft:
            yield "LoRA", setting, run.changed(of_model=lora, weights=None)
        in_bits = run.changed(of_model={**lora, "load_in_4bit": True}, weights=None)
        yield "LoRA on 4 bits", f"--load_in_4bit true {setting}", in_bits
    devices, measured = run.sharding.devices, run
    for profile in ("zero2", "fsdp2", "zero3") if devices > 1 else ():
        sharding = sharding_of(profile, devices, half=bool(args.bf16))
        if sharding != run.sharding and not (profile != "fsdp2" and args.weights):
            measured = measured.with_phases_of(replace(run, sharding=sharding))
            yield sharding.name, f"--accelerate_config {profile}", measured
