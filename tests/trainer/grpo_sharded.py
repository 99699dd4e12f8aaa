"""Rollouts of two processes with sharded weights over gloo: `torchrun ... -m tests.trainer.grpo_sharded FOLDER HOW RUN...`.

HOW: one of `KINDS`. RUN: names of `RUNS`; the process with rank 0 writes their weights, each its logs and counts.
"""

import sys
from pathlib import Path

import torch

from tests.tiny import tiny_model
from tests.trainer import grpo_agent_runs, grpo_runs, grpo_tool_runs
from tests.trainer.grpo_runs import logs
from tests.trainer.sharded_worker import exit_now, shard
from trl.trainer import online_trainer

KINDS = ("fsdp2", "zero2", "zero3")
# Windows of 16 completions, two optimiser steps each, which the reference's divergence holds back.
SETTINGS = {
    "dtype": "float32", "per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 4, "optim": "adamw_torch",
    "adam_epsilon": 1e-4, "learning_rate": 1e-3, "max_grad_norm": 1.0, "beta": 0.1, "prefix_sharing": False,
    "save_strategy": "steps", "save_steps": 3,
}  # fmt: skip
AGENTS = {
    "max_steps": 2, "beta": 0.0, "steps_per_generation": 1, "save_steps": 1, "agent_keep_sessions": True, "learning_rate": 1e-2,
}  # fmt: skip
# Four steps, the same from the checkpoint within their second window, and a window with tools.
RUNS = {
    "whole": {},
    "resumed": {},
    "tools": {"max_steps": 2, "max_completion_length": 40, "seed": 17, "data_seed": 1},
    "distillation": {"method": "distillation", "max_steps": 2, "beta": 0.5},
    "minillm": {"method": "minillm", "max_steps": 2, "beta": 0.0, "gamma": 0.9, "kd_temperature": 1.3},
    "sdft": {"method": "sdft", "max_steps": 2, "beta": None, "teacher_model_kind": "ema", "teacher_update_rate": 0.3},
    "sdpo": {
        "method": "sdpo", "max_steps": 2, "beta": 0.0, "teacher_model_kind": "live", "distillation_weight": 0.6,
        "success_reward_threshold": 0.6,
    },
    "agents": AGENTS,
    "agents-again": AGENTS,
}  # fmt: skip
OF_GRPO, OF_TEACHERS = ("whole", "resumed", "tools"), ("distillation", "minillm", "sdft", "sdpo")
OF_AGENTS = ("agents", "agents-again")


def policy_of(name: str):
    """The policy that a run begins with."""
    return grpo_tool_runs.caller("llama", torch.float32) if name in ("tools", *OF_AGENTS) else tiny_model("llama")


def models_of(name: str) -> dict:
    """The policy, and a teacher where it is another model."""
    teacher = {"teacher_model": tiny_model("llama", seed=1)} if name in ("distillation", "minillm") else {}
    return {"model": policy_of(name), **teacher}


def finished(name: str, models: dict, folder: str, **settings):
    """A trainer after its run, and how often it asked for whole weights (`nothing`: without a prompt), scored with the policy
    and loaded a window."""
    makers = {"tools": grpo_tool_runs.make, **dict.fromkeys(OF_AGENTS, grpo_agent_runs.agents)}
    make = makers.get(name, grpo_runs.make)
    own = {key: value for key, value in {**SETTINGS, **RUNS[name], **settings}.items() if value is not None}
    trainer, keep = make(folder=folder, given=models, **own)
    trainer.remove_callback(keep)  # it asks for whole gradients
    counts = {"generate": 0, "nothing": 0, "live": 0, "score_rollout": 0, "load_rollout_batch": 0}
    loads = online_trainer.load_rollout_batch
    for holder, method in (
        (trainer.engine, "generate"),
        (trainer.engine, "live"),
        (trainer, "score_rollout"),
        (online_trainer, "load_rollout_batch"),
    ):
        count_calls(holder, method, counts)
    if name == "agents-again" and trainer.args.process_index == 1:  # the other process finds all its sessions
        for journal in Path(folder, "sessions").glob("00000001-*-1.jsonl"):
            journal.unlink()
    checkpoint = {"resumed": "checkpoint-3", "agents-again": "checkpoint-1"}.get(name)
    try:
        trainer.train(resume_from_checkpoint=checkpoint and f"{folder}/{checkpoint}")
    finally:
        online_trainer.load_rollout_batch = loads  # of all trainers of this process
    return trainer, dict(counts)


def count_calls(holder, method: str, counts: dict[str, int]) -> None:
    inner = getattr(holder, method)

    def counted(*args, **kwargs):
        counts[method] += 1
        counts["nothing"] += method == "generate" and not args[0]
        return inner(*args, **kwargs)

    setattr(holder, method, counted)


def main(folder: str, how: str, *names: str) -> None:
    settings = {"per_device_train_batch_size": 4, **shard(how)}
    from trl.models.distributed import is_sharded

    torch.set_num_threads(1)
    models = {name: models_of(name) for name in names}  # ZeRO-3, once on, shards new ones
    for name, own in models.items():
        trainer, counts = finished(name, own, folder, **settings)
        assert is_sharded(trainer.model) == (how != "zero2")
        trainer.save_model(f"{folder}/{name}")
        torch.save({"logs": logs(trainer), "counts": counts}, Path(folder, f"{name}_{trainer.args.process_index}.pt"))
    exit_now(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
