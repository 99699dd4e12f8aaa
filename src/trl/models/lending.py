"""Blocks in which a policy is used for something else; it is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trl.models.peft import is_peft_model


def peft_model_in(policy: nn.Module) -> Any:
    """The `PeftModel` inside a wrapped policy. Raises TypeError if there is none."""
    for module in policy.modules():
        if is_peft_model(module):
            return module
    raise TypeError(
        f"the policy must be a PeftModel to be its own reference, got {type(policy).__name__}. Pass the model that the "
        "trainer trains."
    )


def without_ddp(policy: nn.Module) -> nn.Module:
    """The module inside DDP, whose copying of buffers would break a graph that waits for backward."""
    return policy.module if isinstance(policy, DistributedDataParallel) else policy


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; each module's mode and the random number generators are restored."""
    first = next(model.parameters(), None)
    devices = [first.device] if first is not None and first.is_cuda else []
    with torch.random.fork_rng(devices=devices), in_eval_mode(model):
        yield


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; each module's mode is restored."""
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
