"""SFT in processes with FSDP2 and sharded checkpoints: `-m tests.trainer.sharded_checkpoints_worker OUT KILL`.

KILL: `kill` dies while a checkpoint is written beside training, with its weights there and no optimiser yet. Otherwise the run
goes on from its newest checkpoint; two processes (with `async_save`) then train it without a stop, too, and write the model.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.checkpoint import FileSystemWriter
from transformers import TrainerCallback

from tests.tiny import tiny_model
from tests.trainer.one_step import fixed_rows, trainer_of
from tests.trainer.resume_worker import die
from tests.trainer.sharded_worker import exit_now, shard
from trl import SFTConfig, SFTTrainer
from trl.checkpoints import background
from trl.checkpoints.wholeness import CheckpointError
from trl.models.switches import holding

STEPS = {
    "per_device_train_batch_size": 1, "max_steps": 3, "learning_rate": 1e-2, "optim": "adamw_torch", "max_grad_norm": 1.0,
    "adam_epsilon": 1e-4, "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip


def made(out: Path, **settings: Any) -> Any:
    """A trainer of three steps of eight rows."""
    model = tiny_model("llama", dtype=torch.float64)
    accumulated = 8 // int(os.environ.get("WORLD_SIZE", "1"))
    settings = {**STEPS, "gradient_accumulation_steps": accumulated, "model": model, **settings}
    data = Dataset.from_list(fixed_rows())
    trainer = trainer_of(SFTTrainer, SFTConfig, str(out), settings, train_dataset=data, eval_dataset=data)
    trainer.remove_callback(trainer.keep)  # it asks for whole gradients
    return trainer


def trained(out: Path, resume: str | bool | None = None, **settings: Any) -> Any:
    """The trainer after its steps."""
    trainer = made(out, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def dies_at_third() -> None:
    save, count = background.save, [0]

    def wrapped(*args: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] == 6:  # weights and optimiser of three checkpoints
            die()
        save(*args, **options)

    background.save = wrapped


class LateWrite(TrainerCallback):
    """Lets the write of checkpoint `step` fail in process 1, when training is `later` steps further and then perhaps `stops`."""

    inner: Any  # the writer's `write_data`

    def __init__(self, step: int, later: int, stops: bool) -> None:
        self.step, self.until, self.stops, self.waited, self.is_later = step, step + later, stops, [], threading.Event()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 >= self.until:
            self.is_later.set()
            if self.stops:
                raise RuntimeError("training stops")

    def write_data(self, *args: Any) -> Any:
        writer = args[0]
        if f"checkpoint-{self.step}/" in str(writer.path):
            self.waited.append(self.is_later.wait(30))
            if os.environ["RANK"] == "1":
                raise OSError("the disk is full")
        return self.inner(*args)


def failing(out: Path, step: int, later: int, stops: bool = False) -> str:
    """How a run of three steps ends where the write of a checkpoint fails, and its newest checkpoint."""
    writes = LateWrite(step, later, stops)
    trainer = made(out, async_save=True, callbacks=[writes])
    writes.inner = FileSystemWriter.write_data
    with holding(FileSystemWriter, "write_data", lambda *args: writes.write_data(*args)):
        try:
            trainer.train()
        except (CheckpointError, RuntimeError) as error:
            return f"{writes.waited} {error} {trainer.runs.newest_checkpoint.name}"
    return "no error"


def main(out: str, kill: str) -> None:
    shard("fsdp2")
    os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    torch.set_num_threads(1)
    rank, processes = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    beside: dict[str, Any] = {"async_save": processes == 2, "checkpoint_mirror": f"file://{out}/mirror"}
    if kill == "kill":
        dies_at_third()
        trained(Path(out, "run"), **beside)
    trainer = trained(Path(out, "run"), resume=True, **beside)
    trainer.save_model(str(Path(out, f"model {processes}")))
    if processes == 2:
        trained(Path(out, "whole"), save_strategy="no").save_model(str(Path(out, "whole")))
        best = trained(
            Path(out, "best"), async_save=True, save_total_limit=1, load_best_model_at_end=True, eval_strategy="steps",
            eval_steps=1, metric_for_best_model="loss", greater_is_better=True,
        )  # fmt: skip
        best.save_model(str(Path(out, "best model")))
        errors = [
            failing(Path(out, "next"), 2, 1),
            failing(Path(out, "end"), 3, 0),
            failing(Path(out, "both"), 2, 1, True),
        ]
        Path(out, f"errors {rank}").write_text("\n".join(errors))
        os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
        try:
            trained(Path(out, "other"), resume=str(Path(out, "run", "checkpoint-3")))
        except CheckpointError as error:
            Path(out, "refused").write_text(str(error))
    exit_now(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
