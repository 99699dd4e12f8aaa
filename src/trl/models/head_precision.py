"""An output head in float32 on a model of lower precision: probabilities are a softmax over large logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trl.models.parts import causal_core

_MARK = "computes_in_float32"


def cast_head_to_float32(model: nn.Module) -> None:
    """Keep the weights of a model's output head in float32 from now on, in place, and compute its products in float32.

    Copies of the model do so too. A head of float32 or more stays as it is. Raises ValueError where the head is the input
    embedding, whose outputs would change.
    """
    core = causal_core(model)
    head = core.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"cast_lm_head_to_fp32=True needs an output head, and {type(core).__name__} shows none. Leave it out."
        )
    own = {id(parameter) for parameter in head.parameters()}
    if any(id(parameter) in own for parameter in core.get_input_embeddings().parameters()):
        raise ValueError(
            f"cast_lm_head_to_fp32=True was given with a {type(core).__name__} whose head is its input embedding, expected a head "
            "of its own. Leave it out, or load the model in float32."
        )
    narrow = [part for part in head.modules() if isinstance(part, nn.Linear) and _is_narrow(part.weight)]
    for part in narrow:
        part.float()
        part.register_forward_pre_hook(_in_float32)
        setattr(part, _MARK, True)


def as_the_head_wants(head: nn.Module | None, device: str) -> AbstractContextManager[Any]:
    """A block for products with the head: without autocast where the head is kept in float32."""
    return torch.autocast(device, enabled=False) if getattr(head, _MARK, False) else nullcontext()


def _is_narrow(weight: Tensor) -> bool:
    return weight.dtype in (torch.float16, torch.bfloat16)


def _in_float32(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].float(), *inputs[1:])
