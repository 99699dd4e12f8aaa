"""Rotary embeddings whose angles depend on a sequence's length: each sequence of a batch gets those of its own.

transformers takes the longest position of a call for all of its rows: a short sequence would be scored in another way beside
a long one, so that losses and gradients would depend on how a step is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trl.models.layout import ModelBatch
from trl.models.parts import replaced_forward

Angles = tuple[Tensor, Tensor]

_STRETCHED = ("longrope", "dynamic")  # other frequencies for sequences beyond the length of pretraining


def stretched_rotaries(model: nn.Module) -> list[Any]:
    """The rotary embeddings of a model that turn long sequences by other angles than short ones."""
    return [module for module in model.modules() if getattr(module, "rope_type", None) in _STRETCHED]


@contextmanager
def rotated_by_sequence(rotaries: Iterable[Any], batch: ModelBatch) -> Iterator[None]:
    """Let these rotary embeddings (`stretched_rotaries`) see each sequence of a batch as if it were alone, for a forward inside.

    A prompt that several completions share has one length: give these models plain sequences.
    """
    with ExitStack() as replaced:
        for module in rotaries:
            replaced.enter_context(replaced_forward(module, _by_sequence(module, batch)))
        yield


def _by_sequence(module: Any, batch: ModelBatch) -> Callable[..., Angles]:
    """The forward of a rotary embedding, `(x, position_ids (1 or B, T)) -> cosines and sines (B, T, D)`."""
    inner, shape = module.forward, batch.inputs["input_ids"].shape
    lengths, longest = batch.sequence_lengths.view(shape), _longest_as_trained(module)
    kinds = lengths.clamp(min=longest)
    if module.rope_type == "longrope":  # all that are longer are turned alike
        kinds = kinds.clamp(max=longest + 1)

    def forward(x: Tensor, position_ids: Tensor, **kwargs: Any) -> Angles:
        if position_ids.shape[-2:] != shape and position_ids.shape != (1, shape[1]):
            return inner(x, position_ids, **kwargs)
        position_ids, found = position_ids.expand(shape), None
        for kind in kinds.unique().tolist():
            own = (kinds == kind) & (lengths > 0)
            _forget(module)
            angles = inner(x, position_ids.where(own, 0), **kwargs)
            found = angles if found is None else _where(own, angles, found)
        assert found is not None
        return found

    return forward


def _where(own: Tensor, angles: Angles, others: Angles) -> Angles:
    cosines, sines = (torch.where(own[..., None], a, b) for a, b in zip(angles, others, strict=True))
    return cosines, sines


def _longest_as_trained(module: Any) -> int:
    """The longest sequence that is turned as in pretraining."""
    if module.rope_type == "dynamic":
        return int(module.original_max_seq_len)
    return int(module.config.rope_parameters["original_max_position_embeddings"])


def _forget(module: Any) -> None:
    """Take back what an earlier, longer sequence left: "dynamic" angles only ever grow."""
    if module.rope_type == "dynamic":
        frequencies = module.original_inv_freq.to(module.inv_freq.device)
        module.register_buffer("inv_freq", frequencies, persistent=False)
        module.max_seq_len_cached = module.original_max_seq_len
