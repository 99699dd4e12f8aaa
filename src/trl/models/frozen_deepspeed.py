"""A frozen model under DeepSpeed, for loops without a trainer."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState

from trl.models.distributed import deepspeed_config, frozen_engine


def prepare_deepspeed(
    model: torch.nn.Module, per_device_train_batch_size: int, fp16: bool = False, bf16: bool = False
) -> torch.nn.Module:
    """Wrap a frozen model with the DeepSpeed config of this process's accelerate state, in eval mode.

    `per_device_train_batch_size` is in rows. Weights are cast where `fp16` or `bf16` is set, and are sharded under ZeRO-3 only.
    Raises: ValueError for a run without DeepSpeed.
    """
    config = deepspeed_config(AcceleratorState())
    config.pop("train_batch_size", None)
    config |= {
        "train_micro_batch_size_per_gpu": per_device_train_batch_size,
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": fp16},
        "bf16": {"enabled": bf16},
    }
    return frozen_engine(model, config)
