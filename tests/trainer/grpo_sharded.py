"""GRPO of two processes with sharded weights over gloo: `torchrun ... -m tests.trainer.grpo_sharded FOLDER HOW`.

HOW: one of `KINDS`. A run of four steps, and one that goes on from the checkpoint within its second window; the process
with rank 0 writes their weights and logs.
"""

import copy
import os
import sys
from pathlib import Path

import torch

from tests.tiny import tiny_model
from tests.trainer.grpo_runs import logs, make
from tests.trainer.sharded_worker import DEEPSPEED, exit_now, use_fsdp_on_cpu
from trl.trainer import online_trainer

KINDS = ("fsdp2", "zero2", "zero3")
# Windows of 16 completions, two optimiser steps each, which the reference's divergence holds back.
SETTINGS = {
    "dtype": "float32", "per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 4, "optim": "adamw_torch",
    "adam_epsilon": 1e-4, "learning_rate": 1e-3, "max_grad_norm": 1.0, "beta": 0.1, "prefix_sharing": False,
    "save_strategy": "steps", "save_steps": 3,
}  # fmt: skip


def four_steps(model, folder: str, *, resumes: bool = False, **settings):
    """A trainer after its run, and how often it asked for whole weights, scored with the policy and loaded a window."""
    trainer, keep = make(folder=folder, given={"model": model}, **{**SETTINGS, **settings})
    trainer.remove_callback(keep)  # it asks for whole gradients
    counts = {"generate": 0, "score_rollout": 0, "load_window": 0}
    for holder, name in (
        (trainer.engine, "generate"),
        (trainer, "score_rollout"),
        (online_trainer, "load_window"),
    ):
        count_calls(holder, name, counts)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resumes else None)
    return trainer, counts


def count_calls(holder, name: str, counts: dict[str, int]) -> None:
    inner = getattr(holder, name)

    def counted(*args, **kwargs):
        counts[name] += 1
        return inner(*args, **kwargs)

    setattr(holder, name, counted)


def main(folder: str, how: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    settings: dict = {"per_device_train_batch_size": 4}
    if how == "fsdp2":
        use_fsdp_on_cpu()
    else:
        settings["deepspeed"] = copy.deepcopy(DEEPSPEED)
        settings["deepspeed"]["zero_optimization"]["stage"] = int(how[-1])
    from trl.models.distributed import is_sharded

    torch.set_num_threads(1)
    models = [tiny_model("llama") for _ in range(2)]  # ZeRO-3, once on, shards new ones
    for name, model in zip(("whole", "resumed"), models, strict=True):
        trainer, counts = four_steps(model, folder, resumes=name == "resumed", **settings)
        assert is_sharded(trainer.model) == (how != "zero2")
        trainer.save_model(f"{folder}/{name}")
        if trainer.is_world_process_zero():
            torch.save({"logs": logs(trainer), "counts": counts}, Path(folder, f"{name}.pt"))
    exit_now(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
