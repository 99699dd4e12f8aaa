"""Gradient checkpointing switched on with what it needs, and off for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


def enable_gradient_checkpointing(
    model: PreTrainedModel, gradient_checkpointing_kwargs: dict[str, Any] | None
) -> PreTrainedModel:
    """Turn gradient checkpointing on, in place, and return the model.

    `gradient_checkpointing_kwargs` go to `torch.utils.checkpoint.checkpoint`; `use_reentrant` defaults to False. The
    embedding's output is made to require gradients, without which a reentrant checkpoint over a frozen base
    (PEFT, quantised weights) would cut the graph.
    """
    kwargs = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    return model


@contextmanager
def disable_gradient_checkpointing(
    model: PreTrainedModel, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> Iterator[None]:
    """Turn gradient checkpointing off inside the block and restore each module's setting after it, errors included.

    The modules keep their checkpoint function, so `gradient_checkpointing_kwargs` is only accepted for programs that
    pass it.
    """
    switched: list[Any] = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    for module in switched:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True
