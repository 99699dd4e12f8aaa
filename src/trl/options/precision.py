"""Which floating-point format a run uses when nobody said."""

import os

import torch
from transformers.utils import is_torch_bf16_gpu_available


def default_bf16(*, use_cpu: bool, fp16: bool) -> bool:
    """Whether `bf16=None` means bfloat16 here: on an accelerator that computes in it, and nowhere else.

    False on a CPU (float32), with `fp16=True`, and where `accelerate launch` was told fp16 or fp8: what was asked for
    explicitly wins over a default.
    """
    launched_with = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    on_cpu = use_cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    if fp16 or on_cpu or launched_with in ("fp16", "fp8"):
        return False
    return accelerator_has_bf16()


def accelerator_has_bf16() -> bool:
    """Whether this machine's accelerator has bfloat16 arithmetic of its own (emulation on older GPUs is slow)."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(is_torch_bf16_gpu_available())
