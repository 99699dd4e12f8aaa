"""Modes of a model and blocks that restore them: eval mode, random streams, gradient checkpointing, dropout."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from trl.options.checks import CHECKPOINTING

# Attributes of layers that drop by calling a function: of the attention of Llama and its kin, of OPT and BART.
_PROBABILITIES = ("attention_dropout", "dropout", "activation_dropout")


def without_ddp(policy: nn.Module) -> nn.Module:
    """The module inside DDP, whose copying of buffers would break a graph that waits for backward."""
    return policy.module if isinstance(policy, DistributedDataParallel) else policy


@contextmanager
def holding(holders: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute of an object, or of each in a list, another value within."""
    kept = [(holder, getattr(holder, name)) for holder in (holders if isinstance(holders, list) else [holders])]
    for holder, _ in kept:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, before in kept:
            setattr(holder, name, before)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; each module's mode and the random number generators are restored."""
    first = next(model.parameters(), None)
    devices = [first.device] if first is not None and first.is_cuda else []
    with torch.random.fork_rng(devices=devices), in_eval_mode(model):
        yield


def seed_of(*numbers: int) -> int:
    """A seed of 63 bits for a seed and the numbers of what is drawn, such as epoch and image.

    >>> seed_of(0, 1) == seed_of(0, 1) != seed_of(1, 0)
    True
    """
    return int(np.random.SeedSequence([abs(number) for number in numbers]).generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's random numbers, such as those of dropout, follow from `seed` inside; its generators are restored."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def in_eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Eval mode inside; each module's mode is restored."""
    return holding([module for module in model.modules() if module.training], "training", False)


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


def enable_gradient_checkpointing(
    model: PreTrainedModel, gradient_checkpointing_kwargs: dict[str, object] | str | None
) -> PreTrainedModel:
    """Turn gradient checkpointing on, in place, and return the model.

    `gradient_checkpointing_kwargs` go to `torch.utils.checkpoint.checkpoint`; `use_reentrant` defaults to False. The
    embedding's output is made to require gradients, without which a reentrant checkpoint over a frozen base
    (PEFT, quantised weights) would cut the graph.
    """
    assert not isinstance(gradient_checkpointing_kwargs, str)  # read by the config
    kwargs = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
    method = [f"{name}_enable" for name in CHECKPOINTING if hasattr(model, f"{name}_enable")][-1]
    getattr(model, method)(kwargs)
    return model


def checkpointed_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that gradient checkpointing is on in."""
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]


def disable_gradient_checkpointing(
    model: nn.Module, gradient_checkpointing_kwargs: object = None
) -> AbstractContextManager[None]:
    """Turn gradient checkpointing off inside the block and restore each module's setting after it, errors included.

    The modules keep their checkpoint function; `gradient_checkpointing_kwargs` is accepted for older programs.
    """
    return holding(checkpointed_modules(model), "gradient_checkpointing", False)


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set the probability of every dropout in `model` to 0, in place: `model.train()` does not switch it on again."""
    for module, name in _dropouts(model):
        setattr(module, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """Whether something in `model` drops values in training."""
    return any(getattr(module, name) > 0 for module, name in _dropouts(model))


def _dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that drop, and the names of their probabilities."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module, "p"
        yield from ((module, name) for name in _PROBABILITIES if isinstance(module.__dict__.get(name), float))


def empty_cache() -> None:
    """Collect garbage and release the cached memory of the accelerator there is; nothing on a CPU."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


class PPODecorators:
    """Known place of a switch and a decorator; `optimize_device_cache`: release a block's memory."""

    optimize_device_cache = False

    @classmethod
    @contextmanager
    def empty_device_cache(cls) -> Iterator[None]:
        """A block (as a decorator: a function) after which the device's cache is emptied."""
        try:
            yield
        finally:
            if cls.optimize_device_cache:
                empty_cache()
