"""A model during generation: whole weights, eval mode; restored afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from trl.models.distributed import fsdp2_modules, unwrap_model_for_generation
from trl.models.switches import disable_gradient_checkpointing, undisturbed, without_ddp


@contextmanager
def generating(model: nn.Module, accelerator: Any | None, *, gather_zero3: bool = True) -> Iterator[Any]:
    """Yield the transformers model or `PeftModel` inside `model`, with whole weights, in eval mode, without gradients.

    Wrappers are removed (torch.compile, a value head; DDP, FSDP and DeepSpeed with the `accelerator`). Sharded weights are gathered
    once (ZeRO-3 not if `gather_zero3=False`). Modes and random states are restored.
    """
    model = getattr(model, "_orig_mod", model)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(undisturbed(model))
        if accelerator is None:
            inner: Any = without_ddp(model)
            stack.enter_context(disable_gradient_checkpointing(inner))
        else:
            inner = stack.enter_context(unwrap_model_for_generation(model, accelerator, gather_zero3))
        stack.enter_context(_whole_fsdp2(inner))
        yield without_heads(inner)


def without_heads(model: Any) -> Any:
    """The language model inside a value-head wrapper."""
    inner = getattr(model, "pretrained_model", None)
    return inner if isinstance(inner, nn.Module) else model


def without_wrappers(model: Any) -> Any:
    """The transformers model or `PeftModel` inside training wrappers and a value head."""
    return without_heads(extract_model_from_parallel(model, keep_torch_compile=False))


@contextmanager
def _whole_fsdp2(model: nn.Module) -> Iterator[None]:
    """Unshard each FSDP2 module once, and disable its hooks meanwhile."""
    sharded = fsdp2_modules(model)
    for module in sharded:
        module.unshard()
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in sharded]
    for module in sharded:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after
            module.reshard()
