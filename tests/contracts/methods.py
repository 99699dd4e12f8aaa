"""Every method with the settings under which the contracts test it, and what comes of its steps.

As a program in two processes: `-m tests.contracts.methods OUT.pt` runs each of them on half the rows per process.
"""

import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from tests.experimental import ppo_runs
from tests.experimental.gold_runs import gold
from tests.tiny import tiny_model
from tests.trainer import group_methods, preference_methods
from tests.trainer.one_step import fixed_rows, trainer_of
from trl import GKDConfig, GKDTrainer, SFTConfig, SFTTrainer

CLOCKS = ("runtime", "per_second", "eps", "preparation_time")
OF_THE_RUN = ("epoch", "step", "grad_norm", "learning_rate")


class Found(NamedTuple):
    """Gradients and logs of each step, and on request metrics of seven rows, one of which two whole batches lack."""

    gradients: list[dict[str, torch.Tensor]]
    logs: list[dict[str, float]]
    evaluation: dict[str, float]


def metrics_of(trainer: Any, rows: Any) -> dict[str, float]:
    found = trainer.evaluate(rows)
    return {name: value for name, value in found.items() if not any(word in name for word in CLOCKS)}


# ---- one step on eight rows


def sft(out: str | None = None, **settings: Any) -> Any:
    settings.setdefault("model", tiny_model("gpt2", dtype=torch.float64))
    return trainer_of(SFTTrainer, SFTConfig, out, settings, train_dataset=Dataset.from_list(fixed_rows()))


def adapted() -> Any:
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(tiny_model("gpt2", dtype=torch.float64), config).double()


def gkd(out: str | None = None, **settings: Any) -> Any:
    settings.setdefault("model", tiny_model("gpt2", dtype=torch.float64))
    if settings["model"] is adapted:
        settings["model"] = adapted()
    teacher = tiny_model("llama", dtype=torch.float64)
    settings = {"lmbda": 0.0, "max_new_tokens": 6, **settings}
    rows = [{**row, "completion_mask": [0, *row["completion_mask"][1:]]} for row in fixed_rows()]  # all have a prompt
    return trainer_of(
        GKDTrainer, GKDConfig, out, settings, teacher_model=teacher, train_dataset=Dataset.from_list(rows)
    )


def gkd_several(out: str | None = None, **settings: Any) -> Any:
    """GKD from two models, which the rows name."""
    models = {
        "a": tiny_model("llama", dtype=torch.float64),
        "b": tiny_model("gpt2", dtype=torch.float64, seed=1),
    }
    rows = [
        {**row, "completion_mask": [0, *row["completion_mask"][1:]], "teacher": name}
        for row, name in zip(fixed_rows(), "abbabbbb", strict=True)
    ]
    return gkd(out, **{"teacher_model": models, "train_dataset": Dataset.from_list(rows), **settings})


def gkd_columns(out: str | None = None, **settings: Any) -> Any:
    """GKD from columns with all of the teacher's tokens."""
    settings.setdefault("model", tiny_model("gpt2", dtype=torch.float64))
    rows, teacher = [], tiny_model("llama", dtype=torch.float64)
    for row in fixed_rows():
        with torch.no_grad():
            logits = teacher(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1] / 0.9
        best = logits[torch.tensor(row["completion_mask"][1:]) != 0].log_softmax(-1).topk(96)
        rows.append({**row, "teacher_ids": best.indices.tolist(), "teacher_logps": best.values.tolist()})
    return trainer_of(GKDTrainer, GKDConfig, out, {"lmbda": 0.0, **settings}, train_dataset=Dataset.from_list(rows))


ROWS: dict[str, preference_methods.Method] = {
    "sft": (sft, {}),
    "sft-dft": (sft, {"loss_type": "dft"}),
    "sft-padding-free": (sft, {"padding_free": True}),
    "gkd": (gkd, {}),
    "gkd-reverse": (gkd, {"beta": 1.0, "temperature": 2.0, "padding_free": True}),
    "gkd-on-policy": (gkd, {"lmbda": 1.0}),
    "gkd-several": (gkd_several, {"lmbda": 1.0}),
    "gkd-base": (gkd, {"teacher_model": None, "model": adapted}),
    "gkd-columns": (gkd_columns, {}),
    "gkd-columns-padding-free": (gkd_columns, {"padding_free": True}),
    "gold": (gold, {}),
    "gold-hybrid": (gold, {"uld_use_hybrid_loss": True, "uld_crossentropy_weight": 0.5, "lmbda": 1.0}),
    **preference_methods.METHODS,
}
HALVES = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}


def trained(method: str, **settings: Any) -> Any:
    make, own = ROWS[method]
    trainer = make(**{"per_device_eval_batch_size": 8, **own, **settings})
    trainer.train()
    return trainer


def of_rows(method: str, *, evaluates: bool = False, **settings: Any) -> Found:
    trainer = trained(method, **settings)
    log = {name: value for name, value in trainer.state.log_history[0].items() if name not in OF_THE_RUN}
    found = metrics_of(trainer, trainer.train_dataset.select(range(7))) if evaluates else {}
    return Found(trainer.keep.steps, [log], found)


# ---- four steps on sixteen completions


def of_groups(method: str, *, evaluates: bool = False, **settings: Any) -> Found:
    found = group_methods.found_of(method, evaluates=evaluates, **{"per_device_eval_batch_size": 8, **settings})
    logs = [{name: log[name] for name in group_methods.comparable(log)} for log in found["logs"]]
    extremes = ("eval_clip_ratio",)  # those of micro-batches
    kept = {name: value for name, value in found.get("eval", {}).items() if not name.startswith(extremes)}
    return Found(found["gradients"], logs, kept)


# ---- eight steps of PPO on two batches of rollouts


def of_ppo(method: str, *, evaluates: bool = False, **settings: Any) -> Found:
    trainer, keep = ppo_runs.run(**settings)
    found = metrics_of(trainer, ppo_runs.prompts(4)) if evaluates else {}
    return Found(keep.steps, ppo_runs.logs(trainer), found)


class Family(NamedTuple):
    """Methods that are cut in the same ways."""

    run: Callable[..., Found]
    methods: tuple[str, ...]
    in_two_processes: dict[str, Any]
    tolerance: float


FAMILIES = {
    "rows": Family(of_rows, tuple(ROWS), HALVES, 1e-12),
    "groups": Family(of_groups, tuple(group_methods.METHODS), HALVES, 1e-9),
    "ppo": Family(of_ppo, ("ppo",), {"per_device_train_batch_size": 4}, 1e-9),
}
EVERY = [(name, method) for name, family in FAMILIES.items() for method in family.methods]


def main(out: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as in conftest.py
    found = {}
    for name, family in FAMILIES.items():
        for method in family.methods:
            is_evaluated = name != "groups" or method in group_methods.EVALUATED
            found[method] = tuple(family.run(method, evaluates=is_evaluated, **family.in_two_processes))
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
