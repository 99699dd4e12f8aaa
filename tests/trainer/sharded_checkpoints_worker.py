"""SFT in processes with FSDP2 and sharded checkpoints: `-m tests.trainer.sharded_checkpoints_worker OUT KILL`.

KILL: `kill` dies when a checkpoint has weights and no optimiser yet. Otherwise the run goes on from its newest checkpoint; two
processes then train it without a stop, too, and write the model.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer.one_step import fixed_rows, trainer_of
from tests.trainer.resume_worker import die
from tests.trainer.sharded_worker import exit_now, shard
from trl import SFTConfig, SFTTrainer
from trl.checkpoints.wholeness import CheckpointError

STEPS = {
    "per_device_train_batch_size": 1, "max_steps": 3, "learning_rate": 1e-2, "optim": "adamw_torch", "max_grad_norm": 1.0,
    "adam_epsilon": 1e-4, "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip


def trained(out: Path, resume: str | bool | None = None, **settings: Any) -> Any:
    """A trainer after three steps of eight rows."""
    model = tiny_model("llama", dtype=torch.float64)
    accumulated = 8 // int(os.environ.get("WORLD_SIZE", "1"))
    settings = {**STEPS, "gradient_accumulation_steps": accumulated, "model": model, **settings}
    trainer = trainer_of(SFTTrainer, SFTConfig, str(out), settings, train_dataset=Dataset.from_list(fixed_rows()))
    trainer.remove_callback(trainer.keep)  # it asks for whole gradients
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def dies_at_third() -> None:
    save, count = transformers.trainer.save_fsdp_optimizer, [0]

    def wrapped(*args: Any, **kwargs: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            die()
        save(*args, **kwargs)

    transformers.trainer.save_fsdp_optimizer = wrapped


def main(out: str, kill: str) -> None:
    shard("fsdp2")
    os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    torch.set_num_threads(1)
    if kill == "kill":
        dies_at_third()
        trained(Path(out, "run"))
    trainer = trained(Path(out, "run"), resume=True)
    trainer.save_model(str(Path(out, f"model {trainer.args.world_size}")))
    if trainer.args.world_size == 2:
        trained(Path(out, "whole"), save_strategy="no").save_model(str(Path(out, "whole")))
        os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
        try:
            trained(Path(out, "other"), resume=str(Path(out, "run", "checkpoint-3")))
        except CheckpointError as error:
            Path(out, "refused").write_text(str(error))
    exit_now(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
