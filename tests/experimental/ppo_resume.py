"""Trains PPO and kills itself where it is told to: `python -m tests.experimental.ppo_resume JOBS`, as in
`tests.trainer.resume_worker`."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from transformers.trainer_utils import get_last_checkpoint

from tests.experimental.ppo_runs import VOLATILE, even_tokens, make, prompts
from tests.trainer.resume_worker import arm, ending, in_a_process


def noisy(completion_ids: list[list[int]], **columns) -> list[float]:
    """A reward that draws from every global random stream: they must be where they were in a run that went on."""
    noise = [random.random() + np.random.rand() + torch.rand(()).item() for _ in completion_ids]
    return [a + 0.1 * b for a, b in zip(even_tokens(completion_ids), noise, strict=True)]


def main(out: str, kind: str, kill: str = "") -> None:
    torch.set_num_threads(1)
    trainer, _ = make(
        folder=out, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=14, learning_rate=1e-2, optim="adamw_torch",
        lr_scheduler_type="cosine", save_strategy="steps", save_steps=3, save_total_limit=2, logging_steps=2, dtype="float32",
        reward_funcs=noisy, eval_dataset=prompts(2), eval_strategy="steps", eval_steps=5, num_sample_generations=2,
        gradient_checkpointing=kind == "checkpointing", local_rollout_forward_batch_size=5,
    )  # fmt: skip
    arm(trainer, kill)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) is not None)
    found = ending(trainer)
    found["logs"] = [{k: v for k, v in entry.items() if k not in VOLATILE} for entry in found["logs"]]
    Path(out, "end.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    print("ended", json.dumps([in_a_process(job, main) for job in json.loads(sys.argv[1])]))
