"""Small runs of GRPO's variants; as a program under torchrun: `-m tests.experimental.group_runs OUT.pt SETTINGS`."""

import functools
import json
import sys
from typing import Any

import torch

from tests.trainer import grpo_runs
from tests.trainer.one_step import KeepGradients
from trl.experimental.gfpo import GFPOConfig, GFPOTrainer
from trl.experimental.grpo_with_replay_buffer import GRPOWithReplayBufferConfig, GRPOWithReplayBufferTrainer

VARIANTS = {
    "gfpo": (GFPOConfig, GFPOTrainer),
    "replay": (GRPOWithReplayBufferConfig, GRPOWithReplayBufferTrainer),
}
grpo_runs.TRAINERS |= VARIANTS


def shortest(completion_ids: list[list[list[int]]], group_rewards: list[list[float]], **_: Any) -> Any:
    """Short completions, of equal lengths the better ones."""
    return [
        [0.1 * worth - len(ids) for ids, worth in zip(group, rewards, strict=True)]
        for group, rewards in zip(completion_ids, group_rewards, strict=True)
    ]


def make(method: str, **settings: Any) -> tuple[Any, KeepGradients]:
    """A trainer, and what will hold the gradients of its steps; GFPO's keeps two of four."""
    if method == "gfpo":
        settings = {"num_remains_in_group": 2, **settings}
        if settings["num_remains_in_group"] is not None:
            settings["given"] = {"group_filter_func": shortest, **settings.get("given", {})}
    return grpo_runs.make(method, **settings)


run = functools.partial(grpo_runs.run, make=make)


def main(out: str, settings: str) -> None:
    """Run each variant; the main process writes gradients and logs."""
    torch.set_num_threads(1)
    found = {}
    for method in VARIANTS:
        trainer, keep = run(method, **json.loads(settings))
        found[method] = (keep.steps, grpo_runs.logs(trainer))
    if trainer.is_world_process_zero():
        torch.save(found, out)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
