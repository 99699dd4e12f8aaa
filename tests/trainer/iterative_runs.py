"""Steps of `IterativeSFTTrainer` on the eight fixed rows of one_step.py, in this process or under torchrun.

As a program: `torchrun --nproc_per_node 2 -m tests.trainer.iterative_runs OUT.pt '{"per_device_train_batch_size": 2}'`.
"""

import json
import sys
import tempfile
from typing import Any

import torch

from tests.tiny import tiny_model
from tests.trainer.one_step import SETTINGS, KeepGradients, fixed_rows
from tests.trainer.resume_worker import tokenizer
from trl import IterativeSFTConfig, IterativeSFTTrainer


def inputs(rows: list[dict[str, list[int]]] | None = None) -> dict[str, list[torch.Tensor]]:
    """The rows as tensors of `input_ids` and of `labels`, -100 on prompts."""
    rows = fixed_rows() if rows is None else rows
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    masks = [torch.tensor(row["completion_mask"]) for row in rows]
    labels = [torch.where(mask == 1, row, -100) for row, mask in zip(ids, masks, strict=True)]
    return {"input_ids": ids, "labels": labels}


def make(model: Any = None, folder: Any = None, **settings: Any) -> tuple[IterativeSFTTrainer, KeepGradients]:
    """A trainer with the settings of one_step.py but for `settings`, and the gradients of its steps to come."""
    keep = KeepGradients()
    model = tiny_model("gpt2", dtype=torch.float64) if model is None else model
    args = IterativeSFTConfig(str(folder or tempfile.mkdtemp()), **{**SETTINGS, **settings})
    return IterativeSFTTrainer(model, args, processing_class=tokenizer(), callbacks=[keep]), keep


def main(out: str, settings: str) -> None:
    torch.set_num_threads(1)
    trainer, keep = make(**json.loads(settings))
    first = trainer.args.process_index * 4
    trainer.step(**inputs(fixed_rows()[first : first + 4]))
    try:
        trainer.step(**inputs(fixed_rows()[: 2 + 2 * trainer.args.process_index]))
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    if trainer.is_world_process_zero():
        torch.save({"gradients": keep.steps, "logs": trainer.state.log_history, "refusal": refusal}, out)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
