"""Small runs of GRPO and RLOO; as a program under torchrun: `-m tests.trainer.grpo_runs OUT.pt SETTINGS`."""

import json
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer.one_step import KeepGradients
from tests.trainer.resume_worker import tokenizer
from trl.experimental.minillm import MiniLLMConfig, MiniLLMTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.nash_md_config import NashMDConfig
from trl.trainer.nash_md_trainer import NashMDTrainer
from trl.trainer.online_dpo_config import OnlineDPOConfig
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.xpo_config import XPOConfig
from trl.trainer.xpo_trainer import XPOTrainer

SETTINGS = {
    "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 4, "learning_rate": 0.05, "optim": "sgd",
    "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "use_cpu": True,
    "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False, "seed": 11, "max_completion_length": 7,
    "beta": 0.1, "per_device_eval_batch_size": 4,
}  # fmt: skip
TRAINERS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOConfig, GRPOTrainer),
    "rloo": (RLOOConfig, RLOOTrainer),
    "minillm": (MiniLLMConfig, MiniLLMTrainer),
    "distillation": (DistillationConfig, DistillationTrainer),
    "sdft": (SDFTConfig, SDFTTrainer),
    "sdpo": (SDPOConfig, SDPOTrainer),
    "nash_md": (NashMDConfig, NashMDTrainer),
    "online_dpo": (OnlineDPOConfig, OnlineDPOTrainer),
    "xpo": (XPOConfig, XPOTrainer),
}
SELF_DISTILLED = ("sdft", "sdpo")
COMPARED = ("online_dpo", "nash_md", "xpo")
END = "w16"  # one that these models often say
CLOCKS = ("step_time", "runtime", "per_second", "flos")


def prompts(count: int = 11, method: str = "grpo") -> Dataset:
    """Prompts of different lengths, one of them three times; as texts with a context for self-distillation."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    ids = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]
    ids = [*ids, ids[0], ids[1], ids[0]]
    if method not in SELF_DISTILLED:
        return Dataset.from_dict({"input_ids": ids})
    texts = [" ".join(f"w{token}" for token in row) for row in ids]
    contexts = [f"w{number + 5} w9" if number % 3 else "w7" for number in range(len(ids))]
    return Dataset.from_dict({"prompt": texts, "privileged_context": contexts})


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens, and a little for length."""
    return [sum(t % 2 == 0 for t in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


def first_is_rare(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Whether a completion begins with one of some tokens: often the same for a whole group."""
    return [float(ids[0] % 3 == 0) for ids in completion_ids]


REWARDS = {"even_tokens": even_tokens, "first_is_rare": first_is_rare}


def make(method: str = "grpo", *, reward_funcs: Any = even_tokens, **settings: Any) -> tuple[Any, KeepGradients]:
    """A trainer, and what will hold the gradients of its steps; `given` are further arguments of its constructor, `teacher` is the
    architecture of a teacher."""
    keep, (config, trainer) = KeepGradients(), TRAINERS[method]
    dtype, given = getattr(torch, settings.pop("dtype", "float64")), settings.pop("given", {})
    reward_funcs = REWARDS[settings.pop("reward")] if "reward" in settings else reward_funcs
    data, architecture = settings.pop("data", None), settings.pop("architecture", "gpt2")
    if method not in ("distillation", "sdft"):
        given = {"reward_funcs": reward_funcs, **given}
    if "teacher" in settings:
        given["teacher_model"] = tiny_model(settings.pop("teacher"), dtype=dtype)
    common = {name: value for name, value in SETTINGS.items() if name in config.__dataclass_fields__}
    args = config(settings.pop("folder", None) or tempfile.mkdtemp(), **{**common, **settings})
    if method in COMPARED and not {"model", "peft_config"} & set(
        given
    ):  # equal models have log-ratios of rounding errors
        given = {"ref_model": tiny_model(architecture, dtype=dtype, seed=1), **given}
    if (words := given.pop("processing_class", None)) is None:
        words = tokenizer()
        words.eos_token = END
    made = trainer(
        given.pop("model", None) or tiny_model(architecture, dtype=dtype),
        args=args,
        train_dataset=given.pop("train_dataset", prompts(method=method) if data is None else data),
        processing_class=words,
        callbacks=[keep, *given.pop("callbacks", [])],
        **given,
    )
    return made, keep


def run(method: str = "grpo", *, make: Any = make, **settings: Any) -> tuple[Any, KeepGradients]:
    """The same, trained."""
    trainer, keep = make(method, **settings)
    trainer.train()
    return trainer, keep


def logs(trainer: Any) -> list[dict[str, float]]:
    """What was logged with a loss, without clocks."""
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in CLOCKS)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def main(out: str, settings: str, *, make: Any = make, rows: Dataset | None = None) -> None:
    torch.set_num_threads(1)
    trainer, keep = run(make=make, **json.loads(settings))
    metrics = trainer.evaluate(prompts(4) if rows is None else rows)  # seven: the last batch has repeats
    if trainer.is_world_process_zero():
        found = {name: value for name, value in metrics.items() if not any(word in name for word in CLOCKS)}
        torch.save({"gradients": keep.steps, "logs": logs(trainer), "eval": found}, out)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
