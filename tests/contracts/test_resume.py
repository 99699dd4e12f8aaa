"""A run that is stopped and resumed ends in the bits of one that was not: weights, optimiser, schedule, logs.

The checkpoint lies within an epoch, within the rollouts that are learned from and within the steps of one log entry. Runs
that are killed at any moment are those of `tests/trainer/test_resume.py`.
"""

from typing import Any

import pytest

from tests.contracts.methods import gkd, gkd_columns, sft
from tests.experimental import ppo_runs
from tests.experimental.gold_runs import gold
from tests.trainer import grpo_runs
from tests.trainer.dpo_runs import make as dpo
from tests.trainer.group_methods import METHODS as GROUPS
from tests.trainer.preference_methods import RESUMED
from tests.trainer.resume_worker import ending
from tests.trainer.reward_runs import make as reward
from trl.models.teacher import own_teacher
from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback, move_reference

STEPS = {
    "max_steps": 5, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "learning_rate": 1e-2,
    "optim": "adamw_torch", "lr_scheduler_type": "cosine",
}  # fmt: skip
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
# Two rollouts are each learned from in four steps, of which a checkpoint holds the third.
WINDOW = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
    "dynamic_sampling": True, "max_resampling_rounds": 2,
}  # fmt: skip
SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
)


def of_rows(out: str, make: Any, settings: dict[str, Any]) -> Any:
    return make(out, **STEPS, **CUT, **settings)


def of_groups(out: str, settings: dict[str, Any]) -> Any:
    rewards = grpo_runs.first_is_rare
    return grpo_runs.make(**{**settings, **STEPS, **WINDOW}, folder=out, reward_funcs=rewards)[0]


def on_own_prompts(out: str, settings: dict[str, Any]) -> Any:
    """Without dynamic sampling."""
    return grpo_runs.make(**{**settings, **STEPS, **{name: WINDOW[name] for name in SIZES}}, folder=out)[0]


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["score"], task_type="SEQ_CLS")


def following(out: str) -> Any:
    """GKD from an average of the student, which a checkpoint holds."""
    trainer = of_rows(out, gkd, {"lmbda": 0.5})
    trainer.teacher = teacher = own_teacher("ema", trainer.model, trainer.scorer)
    trainer.reference = teacher.reference  # type: ignore[attr-defined]
    trainer.add_callback(SyncRefModelCallback(None, trainer.accelerator, alpha=0.3, every=2))
    trainer._moved_reference = move_reference(trainer)
    return trainer


RESUMED_GROUPS = ("grpo", "dapo-entropy", "rloo", "minillm", "online-dpo-all", "nash-md", "xpo")
METHODS: dict[str, Any] = {
    "sft": lambda out: of_rows(out, sft, {"neftune_noise_alpha": 5.0}),
    "gold": lambda out: of_rows(out, gold, {"lmbda": 0.5, "seq_kd": True}),
    "gkd": lambda out: of_rows(out, gkd, {"lmbda": 0.5, "seq_kd": True}),
    "gkd, columns": lambda out: of_rows(out, gkd_columns, {}),
    "gkd, ema": following,
    **{name: lambda out, given=given: of_rows(out, *given) for name, given in RESUMED.items()},
    "dpo, by length": lambda out: of_rows(out, dpo, {"train_sampling_strategy": "group_by_length"}),
    "reward, adapter": lambda out: of_rows(out, reward, {"peft_config": lora()}),
    **{name: lambda out, name=name: of_groups(out, GROUPS[name]) for name in RESUMED_GROUPS},
    **{name: lambda out, name=name: on_own_prompts(out, GROUPS[name]) for name in ("distillation", "sdft", "sdpo")},
    "ppo": lambda out: ppo_runs.make(
        folder=out, **{**STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    )[0],
}


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_ends_in_the_same_bits(method, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    whole, resumed = (METHODS[method](str(tmp_path / "run")) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    expected, found = ending(whole), ending(resumed)
    assert [entry["step"] for entry in expected["logs"]][:2] == [2, 4]
    assert found["logs"] == expected["logs"]
    assert found == expected
