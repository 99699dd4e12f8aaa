"""Every method that learns from groups, and the runs that compare them."""

from typing import Any

from tests.trainer.grpo_runs import CLOCKS, logs, prompts, run
from trl.objectives.group_policy import LOSS_TYPES

# Of a window of 16 completions two steps learn from 8 each, twice: the ratio is 1 in the first of them alone.
WHOLE = {
    "per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4, "learning_rate": 0.02,
}  # fmt: skip
SEQUENCE = {"importance_sampling_level": "sequence"}
OWN_SETTINGS: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 1.2}, "luspo": SEQUENCE}
PAIRS = {"num_generations": 2, "num_generations_eval": 2}

METHODS: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name, **OWN_SETTINGS.get(name, {})} for name in LOSS_TYPES},
    "grpo-kl": {"loss_type": "grpo", "delta": 1.3, "use_bias_correction_kl": True, "scale_rewards": "batch"},
    "bnpo-masked": {"loss_type": "bnpo", "mask_truncated_completions": True, "beta": 0.0, "data_seed": 1},
    "dapo-entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.4, "beta": 0.0},
    "corrected": {"loss_type": "grpo", "repetition_penalty": 1.2, "scale_rewards": "batch"},
    "gspo": {"loss_type": "grpo", **SEQUENCE, "top_entropy_quantile": 0.4},
    "dapo-teacher": {"loss_type": "dapo", "teacher": "llama", "teacher_kl_coef": 0.5, "beta": 0.0},
    "minillm": {
        "method": "minillm",
        "loss_type": "grpo",
        "teacher": "llama",
        "gamma": 0.9,
        "kd_temperature": 1.3,
        "beta": 0.0,
        "length_normalization": False,
    },
    "distillation": {
        "method": "distillation",
        "teacher": "llama",
        "beta": 0.3,
        "mask_truncated_completions": True,
    },
    "sdft": {
        "method": "sdft",
        "teacher_model_kind": "ema",
        "teacher_update_rate": 0.3,
        "distillation_topk": 5,
        "num_loss_tokens_to_skip": 1,
    },
    "sdpo": {
        "method": "sdpo",
        "beta": 0.0,
        "loss_type": "grpo",
        "distillation_weight": 0.6,
        "success_reward_threshold": 0.6,
        "include_environment_feedback": True,
        "environment_feedback_only_without_solution": True,
    },
    # RLOO's ratio is that of whole completions: soon all of them are clipped
    "rloo": {"method": "rloo", "normalize_advantages": True, "learning_rate": 0.001},
    "online-dpo": {
        "method": "online_dpo",
        **PAIRS,
        "loss_type": "ipo",
        "learning_rate": 1e-4,  # gradients of squares of sums over tokens are large
        "beta": [0.2],
        "missing_eos_penalty": 0.1,
    },
    "online-dpo-all": {
        "method": "online_dpo",
        "num_generations": 4,
        "pair_selection": "all",
        "tie_policy": "both",
        "temperature": 1.0,
    },
    "nash-md": {"method": "nash_md", **PAIRS, "mixture_coef": 0.3},
    "xpo": {"method": "xpo", **PAIRS, "alpha": [0.1, 0.01], "beta": [0.1, 0.2]},
}
EVALUATED = (
    "grpo",
    "dapo",
    "corrected",
    "rloo",
    "minillm",
    "distillation",
    "sdpo",
    "online-dpo",
    "nash-md",
    "xpo",
)


def found_of(method: str, *, evaluates: bool = False, **settings: Any) -> dict[str, Any]:
    """Gradients of each step and logs of a run, and on request what is found of seven prompts in an evaluation."""
    trainer, keep = run(**{**WHOLE, **METHODS[method], **settings})
    found: dict[str, Any] = {"gradients": keep.steps, "logs": logs(trainer)}
    if evaluates:
        rows = prompts(4, METHODS[method].get("method", "grpo"))
        metrics = trainer.evaluate(rows)  # the last batch of two processes has repeats
        found["eval"] = {k: v for k, v in metrics.items() if not any(word in k for word in CLOCKS)}
    return found


def comparable(log: dict[str, float]) -> list[str]:
    """What is logged but for the extremes of clipping, which are those of micro-batches."""
    return [name for name in log if not name.startswith("clip_ratio") or name.endswith("mean")]
