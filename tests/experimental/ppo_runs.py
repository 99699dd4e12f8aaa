"""Small runs of PPO on prompts."""

import tempfile
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_classifier, tiny_model
from tests.trainer.one_step import KeepGradients
from tests.trainer.resume_worker import tokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

SETTINGS = {
    "per_device_train_batch_size": 8, "num_mini_batches": 2, "num_ppo_epochs": 2, "max_steps": 8, "learning_rate": 0.02,
    "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none",
    "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False, "seed": 11,
    "response_length": 7, "stop_token": "eos", "missing_eos_penalty": 0.5, "temperature": 0.8, "kl_coef": 0.2,
    "num_sample_generations": 0, "whiten_rewards": True,
}  # fmt: skip
END = "w16"
VOLATILE = (
    "eps",
    "eval_model_preparation_time",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
)


def prompts(count: int = 11) -> Dataset:
    """Prompts of different lengths, some of them twice."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    ids = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": [*ids, ids[0], ids[1], ids[0]]})


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens, and a little for length."""
    return [sum(t % 2 == 0 for t in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


def make(
    model: Any = None, data: Any = None, *, reward_funcs: Any = even_tokens, **settings: Any
) -> tuple[PPOTrainer, KeepGradients]:
    """A trainer, and what will hold the gradients of its steps; `architecture` and `dtype` are those of all models."""
    keep = KeepGradients()
    kind = settings.pop("architecture", "gpt2")  # its norms are computed in float64, unlike the others'
    dtype = getattr(torch, settings.pop("dtype", "float64"))
    peft_config, callbacks = settings.pop("peft_config", None), settings.pop("callbacks", [])
    given = {name: settings.pop(name) for name in ("ref_model", "reward_model", "eval_dataset") if name in settings}
    value = settings.pop("value_model", "own")
    if value == "own":
        value = tiny_classifier(kind, dtype=dtype, num_labels=1, seed=3)
    args = PPOConfig(settings.pop("folder", None) or tempfile.mkdtemp(), **{**SETTINGS, **settings})
    words = tokenizer()
    words.eos_token = END  # one that these models often say
    trainer = PPOTrainer(
        args,
        words,
        tiny_model(kind, dtype=dtype) if model is None else model,
        given.get("ref_model"),
        given.get("reward_model"),
        prompts() if data is None else data,
        value,
        eval_dataset=given.get("eval_dataset"),
        callbacks=[keep, *callbacks],
        peft_config=peft_config,
        reward_funcs=reward_funcs,
    )
    return trainer, keep


def run(*args: Any, **settings: Any) -> tuple[PPOTrainer, KeepGradients]:
    """The same, trained."""
    trainer, keep = make(*args, **settings)
    trainer.train()
    return trainer, keep


def run_with_models(**settings: Any) -> tuple[PPOTrainer, KeepGradients]:
    """The same with a reward model beside the function, where `reward_model` is its seed."""
    kind, dtype = settings["architecture"], getattr(torch, settings["dtype"])
    reward = tiny_classifier(kind, dtype=dtype, num_labels=1, seed=settings.pop("reward_model"))
    return run(tiny_model(kind, dtype=dtype), reward_model=reward, **settings)


def logs(trainer: PPOTrainer) -> list[dict[str, float]]:
    """What was logged with a loss, without clocks."""
    return [
        {name: value for name, value in entry.items() if name not in VOLATILE}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
