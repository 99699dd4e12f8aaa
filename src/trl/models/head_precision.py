"""An output head in float32 on a model of lower precision."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.models.parts import causal_core

logger = logging.getLogger(__name__)

_MARK = "computes_in_float32"
_UNTIED = "head_was_untied"


def cast_head_to_float32(model: nn.Module) -> None:
    """Cast a model's output head to float32, in place, and compute its products in float32.

    Copies of the model keep this. A head tied to the input embedding is untied, with a warning. Raises ValueError for a model
    without a head.
    """
    core = causal_core(model)
    head = core.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"cast_lm_head_to_fp32=True needs an output head, and {type(core).__name__} shows none. Leave it out."
        )
    tied = {id(parameter) for parameter in core.get_input_embeddings().parameters()}
    half = (torch.float16, torch.bfloat16)
    narrow = [part for part in head.modules() if isinstance(part, nn.Linear) and part.weight.dtype in half]
    for part in narrow:
        if id(part.weight) in tied:
            part.weight = nn.Parameter(part.weight.detach().clone(), part.weight.requires_grad)
            _set_tied(core, False)
            logger.warning(
                "cast_lm_head_to_fp32=True unties the output head of %s from the input embedding, which stays in %s. The "
                "model is saved with tie_word_embeddings=False unless both are still equal.",
                type(core).__name__,
                core.dtype,
            )
        part.float()
        part.register_forward_pre_hook(_in_float32)
        setattr(part, _MARK, True)


def was_untied(model: nn.Module) -> bool:
    """Whether `cast_head_to_float32` separated this transformers model's output head from its input embedding."""
    return isinstance(model, PreTrainedModel) and getattr(model, _UNTIED, False)


@contextmanager
def tied_where_equal(model: Any) -> Iterator[None]:
    """A block, for saving, in which an untied head that still equals the input embedding is that embedding again."""
    if not was_untied(model):
        yield
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    if not torch.equal(head.weight, embedding.float()):
        yield
        return
    own, head.weight = head.weight, embedding
    _set_tied(model, True)
    try:
        yield
    finally:
        head.weight = own
        _set_tied(model, False)


def _set_tied(core: Any, tied: bool) -> None:
    for config in (core.config, core.config.get_text_config()):
        config.tie_word_embeddings = tied
    core.all_tied_weights_keys = core.get_expanded_tied_weights_keys(all_submodels=True)
    setattr(core, _UNTIED, not tied)


def as_the_head_wants(head: nn.Module | None, device: str) -> AbstractContextManager[Any]:
    """A block for products with the head: without autocast where the head is kept in float32."""
    return torch.autocast(device, enabled=False) if getattr(head, _MARK, False) else nullcontext()


def _in_float32(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].float(), *inputs[1:])
