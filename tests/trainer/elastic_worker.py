"""Runs that go on with another number of processes: `-m tests.trainer.elastic_worker FOLDER STEP CASES`.

Each of the CASES (by commas) is trained in its own folder up to optimiser step STEP, from its newest checkpoint on: `noise`
from a mirror.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from tests.contracts import methods
from tests.tiny import tiny_model
from tests.trainer import dpo_runs, grpo_runs
from tests.trainer.resume_worker import rows
from trl.checkpoints.mirror import Mirror

STEP, STEPS = 12, 3  # rows of an optimiser step, over all processes; steps of a run
COMMON = {
    "optim": "adamw_torch", "learning_rate": 1e-2, "adam_epsilon": 1e-4, "logging_steps": 2, "max_steps": STEPS,
    "lr_scheduler_type": "linear", "per_device_train_batch_size": 1, "gradient_accumulation_steps": STEP,
}  # fmt: skip


def sft(out: str, **settings: Any) -> Any:
    return methods.sft(out, **{"train_dataset": Dataset.from_list(rows()), **settings})


def noise(out: str, **settings: Any) -> Any:
    """Dropout and noise on embeddings; the last step of an epoch has eleven rows."""
    model = tiny_model("gpt2", dtype=torch.float64, resid_pdrop=0.2, attn_pdrop=0.1)
    return sft(out, model=model, neftune_noise_alpha=5.0, **settings)


def packed_stream(out: str, **settings: Any) -> Any:
    stream = IterableDataset.from_generator(lambda: iter(rows(70))).shuffle(seed=3, buffer_size=8)
    return sft(out, train_dataset=stream, packing=True, max_length=24, **settings)


def pairs(out: str, **settings: Any) -> Any:
    settings["train_dataset"] = Dataset.from_list(dpo_runs.pairs(count=31))
    return dpo_runs.make(out, train_sampling_strategy="group_by_length", **settings)


def groups(out: str, **settings: Any) -> Any:
    """Two steps to a rollout batch."""
    return grpo_runs.make(folder=out, num_generations=3, generation_batch_size=2 * STEP, **settings)[0]


CASES: dict[str, Callable[..., Any]] = {"noise": noise, "stream": packed_stream, "dpo": pairs, "grpo": groups}


class StopsAt(TrainerCallback):
    """Stops a run, after it has saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def trained(case: str, out: str, step: int = STEPS, *, resume: str | bool | None = None, **settings: Any) -> Any:
    """The case up to a step, with a checkpoint there if it is not the last."""
    saves = {"save_strategy": "no" if step == STEPS else "steps", "save_steps": step}
    trainer = CASES[case](out, **{**COMMON, **saves, **settings})
    trainer.add_callback(StopsAt(step))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(folder: str, step: str, cases: str) -> None:
    torch.set_num_threads(1)
    processes, put = int(os.environ["WORLD_SIZE"]), Mirror.put

    def noted(mirror: Mirror, checkpoint: Path) -> None:
        Path(folder, f"uploads of {os.environ['RANK']}").touch()
        put(mirror, checkpoint)

    Mirror.put = noted
    for case in cases.split(","):
        out = str(Path(folder, case))
        sp_size = 2 if case == "dpo" and processes == 2 else 1  # both share each row
        sizes = {"gradient_accumulation_steps": STEP * sp_size // processes, "sp_size": sp_size}
        resume = get_last_checkpoint(out) if Path(out).is_dir() else None
        if case == "noise":  # its folder is gone after each start
            mirror = Path(folder, "mirror")
            resume, sizes["checkpoint_mirror"] = mirror.exists() or None, f"file://{mirror}"
        trainer = trained(case, out, int(step), resume=resume, **sizes, ddp_backend="gloo")
        if trainer.is_world_process_zero():
            torch.save((trainer.model.state_dict(), trainer.state.log_history), Path(out, "end.pt"))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
