"""Rotary embeddings whose angles depend on a sequence's length.

transformers takes the longest position of a call for all of its rows: a short sequence would be scored differently beside
a long one, so that losses and gradients would depend on how a step is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trl.models.packed.layout import ModelBatch
from trl.models.parts import replaced_forward

_STRETCHED = ("longrope", "dynamic")  # other frequencies for sequences beyond the length of pretraining


def stretched_rotaries(model: nn.Module) -> list[Any]:
    """The rotary embeddings of a model that turn long sequences by other angles than short ones."""
    return [module for module in model.modules() if getattr(module, "rope_type", None) in _STRETCHED]


@contextmanager
def rotated_by_row(rotaries: Iterable[Any], rows: ModelBatch) -> Iterator[None]:
    """A block in which these rotary embeddings compute each of the padded rows as if it were alone."""
    with ExitStack() as replaced:
        for module in rotaries:
            replaced.enter_context(replaced_forward(module, _by_row(module, rows)))
        yield


def _by_row(module: Any, rows: ModelBatch) -> Any:
    inner, width = module.forward, rows.inputs["input_ids"].shape[1]
    lengths = rows.sequence_lengths.view(-1, width).amax(dim=1)

    def forward(x: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if position_ids.shape[1] != width:
            return inner(x, position_ids, **kwargs)
        angles = []
        for length in lengths.tolist():
            inner(x[:1], position_ids[:1, :1] * 0, **kwargs)  # "dynamic" angles only grow until a short call
            angles.append(inner(x[:1], position_ids[:1].clamp(max=length - 1), **kwargs))
        cosines, sines = (torch.cat(part) for part in zip(*angles, strict=True))
        return cosines, sines

    return forward
