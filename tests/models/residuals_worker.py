"""SFT of bfloat16 weights with residuals in two processes, sharded by FSDP2: `-m tests.models.residuals_worker OUT KIND`.

KIND: `FULL_STATE_DICT` or `SHARDED_STATE_DICT`. Four steps, and again the last two from the checkpoint before them: the
process with rank 0 writes the gathered float32 weights of both.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer.one_step import fixed_rows, trainer_of
from tests.trainer.sharded_worker import exit_now, shard
from trl import SFTConfig, SFTTrainer
from trl.models.residuals import join

STEPS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 1e-3,
    "optim": "adamw_torch_fused", "max_grad_norm": 1.0, "adam_epsilon": 1e-4, "save_strategy": "steps", "save_steps": 2,
    "weights": "bf16+residual",
}  # fmt: skip


def steps(out: str, resume: str | None = None, **settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A trainer after its steps, and the float32 weights that it has."""
    settings = {**STEPS, **settings, "model": tiny_model("llama")}
    trainer = trainer_of(SFTTrainer, SFTConfig, out, settings, train_dataset=Dataset.from_list(fixed_rows()))
    trainer.remove_callback(trainer.keep)
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.optimizer.state
    whole = {
        name: join(full(weight.detach()), full(state[weight]["residual"]))
        for name, weight in trainer.model.named_parameters()
    }
    return trainer, whole


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main(out: str, kind: str) -> None:
    settings = shard("fsdp2")
    os.environ["FSDP_STATE_DICT_TYPE"] = kind
    torch.set_num_threads(1)
    _, expected = steps(out, **settings)
    trainer, resumed = steps(out, resume=str(Path(out, "checkpoint-2")), **settings)
    assert all(parameter.dtype == torch.bfloat16 for parameter in trainer.model.parameters())
    if trainer.is_world_process_zero():
        torch.save((expected, resumed), Path(out, "weights.pt"))
    exit_now(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
