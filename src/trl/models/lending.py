"""A policy lent out: something else is done with its weights for a while, and it is put back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trl.models.peft import is_peft_model


def peft_model_in(policy: nn.Module) -> Any:
    """The `PeftModel` inside a wrapped policy.

    Raises: TypeError where there is none.
    """
    for module in policy.modules():
        if is_peft_model(module):
            return module
    raise TypeError(
        f"the policy must be a PeftModel to be its own reference, got {type(policy).__name__}. Pass the model that the "
        "trainer trains."
    )


def without_ddp(policy: nn.Module) -> nn.Module:
    """DDP has nothing to do without a gradient, and its copying of buffers would break a graph that waits for backward."""
    return policy.module if isinstance(policy, DistributedDataParallel) else policy


@contextmanager
def without_adapter(adapted: Any) -> Iterator[None]:
    """`PeftModel.disable_adapter` without the look at every layer's state that it takes first (half of its time)."""
    config = adapted.active_peft_config
    if config.is_prompt_learning or config.is_adaption_prompt:
        with adapted.disable_adapter():
            yield
        return
    adapted.base_model.disable_adapter_layers()
    try:
        yield
    finally:
        adapted.base_model.enable_adapter_layers()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module's own mode and the random streams are put back."""
    first = next(model.parameters(), None)
    devices = [first.device] if first is not None and first.is_cuda else []
    with torch.random.fork_rng(devices=devices), in_eval_mode(model):
        yield


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module's own mode is put back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def same_trainable(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Put `requires_grad` back at the end, and whenever the yielded function is called.

    PEFT flips it when adapters are switched. It must be right inside the block too: FSDP2 (torch 2.13) takes it over
    into the whole weights the first time it gathers them, which may be here.
    """
    kept = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def put_back() -> None:
        for parameter, trains in kept:
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)

    try:
        yield put_back
    finally:
        put_back()
