"""Runs that generate with a server of `stand_in`; under torchrun: `-m tests.generation.served_runs FOLDER HOW URL PORT`.

HOW: `tools`, `agents` (DDP), `fsdp2` or `zero3`.
"""

import sys
from types import SimpleNamespace

import torch

from tests.generation.stand_in import LocalCopy
from tests.tiny import tiny_model
from tests.trainer import grpo_agent_runs, grpo_runs, grpo_tool_runs
from tests.trainer.grpo_runs import CLOCKS, logs
from tests.trainer.sharded_worker import exit_now, shard

# Windows of 16 completions, of which two optimiser steps learn from 8 each.
WINDOWS = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 4}
SHARDED = {
    **WINDOWS, "dtype": "float32", "optim": "adamw_torch", "adam_epsilon": 1e-4, "learning_rate": 1e-3, "beta": 0.0,
    "prefix_sharing": False, "max_grad_norm": 1.0,
}  # fmt: skip
KINDS = {
    "plain": (grpo_runs, lambda: tiny_model("gpt2", dtype=torch.float64), WINDOWS),
    "tools": (grpo_tool_runs, grpo_tool_runs.caller, WINDOWS),
    "agents": (
        SimpleNamespace(make=grpo_agent_runs.agents),
        grpo_tool_runs.caller,
        {"per_device_train_batch_size": 8, "max_steps": 2},
    ),
    "lora": (grpo_runs, lambda: tiny_model("llama", dtype=torch.float64), WINDOWS),
    "sharded": (grpo_runs, lambda: tiny_model("llama"), SHARDED),
}
TURNS = ("tools", "agents")  # several requests for each completion


def asks(url, port, **more):
    """The settings of a run with a server."""
    own = {
        "use_vllm": True,
        "vllm_server_base_url": url,
        "vllm_group_port": port,
        "vllm_server_timeout": 20.0,
    }
    return {**own, **more}


def trainer_of(kind, method="grpo", *, served=None, given=None, **settings):
    """A trainer with a server, or with a copy in this process; and what holds its gradients."""
    runs, policy, own = KINDS[kind]
    given = {"model": policy(), **(given or {})}
    trainer, keep = runs.make(method, given=given, **{**own, **(served or {}), **settings})
    if served is None:
        trainer.rollouts.engine = LocalCopy(trainer.model, trainer.accelerator)
    return trainer, keep


def found_of(kind, method="grpo", **settings):
    """Gradients of each step, logs, and an evaluation behind the run."""
    trainer, keep = trainer_of(kind, method, **settings)
    if kind == "sharded":
        trainer.remove_callback(keep)  # it asks for whole gradients
    trainer.train()
    rows = grpo_runs.prompts(4)
    if kind in TURNS:
        rows = grpo_tool_runs.conversations(3) if kind == "tools" else grpo_agent_runs.ROWS.select(range(3))
    metrics = trainer.evaluate(rows)
    trainer.engine.close()
    metrics = {name: value for name, value in metrics.items() if not any(word in name for word in CLOCKS)}
    return trainer, {"gradients": keep.steps, "logs": logs(trainer), "eval": metrics}


def refused(trainer):
    """What each process says where the second one asks for the impossible."""
    prompts = [[5], []] if trainer.args.process_index else [[5]]
    try:
        return str(trainer.engine.generate(prompts, trainer.sampling))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(folder: str, how: str, url: str, port: str) -> None:
    torch.set_num_threads(1)
    settings: dict = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2}
    if how not in TURNS:
        settings |= {**shard(how), "ds3_gather_for_generation": False}
    kind = how if how in TURNS else "sharded"
    trainer, found = found_of(kind, served=asks(url, int(port)), **settings)
    found["refused"] = refused(trainer)
    trainer.save_model(f"{folder}/model")
    torch.save(found, f"{folder}/found_{trainer.args.process_index}.pt")
    trainer.accelerator.wait_for_everyone()
    exit_now(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
