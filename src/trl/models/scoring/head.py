"""Log-probabilities or a local loss from hidden states and output head, and a router's loss."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as linear_product
from transformers import PreTrainedModel

from trl.models.head_precision import as_the_head_wants
from trl.models.packed.layout import ModelBatch
from trl.models.parts import replaced_forward
from trl.tensors.local_loss import local_loss, local_loss_through
from trl.tensors.logprobs import AnyHead, token_entropies, token_scores, token_scores_through
from trl.tensors.segments import Segments
from trl.tensors.softmax_rows import LogitRule, Statistics

LossOf = Callable[[Tensor, slice], Tensor]
"""(log-probs of a chunk (C,), which scored positions these are) -> each token's weighted loss (C,)."""
Reader = Callable[[nn.Module, Tensor, LogitRule, Tensor | None], dict[str, Any]]
"""(head, hidden states (tokens, H), rule of the logits, bias outside of the head) -> what was found."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What to compute beside the log-probabilities.

    `entropy`: of the scored positions, of all real tokens (summed), or not at all. `correct`: whether the most likely
    token was the target. `collision`: the log of the sum over the vocabulary of p^2 (WPO). `mean_logits`: of the logits
    over the vocabulary, before the temperature. All but the log-probabilities and entropies are detached.
    `temperature` divides the logits.
    """

    loss_of: LossOf | None = None
    entropy: Literal["none", "scored", "all"] = "none"
    correct: bool = False
    collision: bool = False
    mean_logits: bool = False
    temperature: float = 1.0


def call_head(
    head: nn.Module, hidden: Tensor, function: Callable[[nn.Module, Tensor], dict[str, Any]]
) -> dict[str, Any]:
    """Run `function(head, hidden (tokens, H))` as the head's own forward; a head that PEFT saves is the layer inside."""
    plain = plain_linear(head)
    if plain is None:
        return function(head, hidden)
    replaced = replaced_forward(plain, lambda states: function(plain, states))
    with as_the_head_wants(plain, hidden.device.type), replaced:
        return plain(hidden)


def plain_linear(head: nn.Module) -> nn.Linear | None:
    """The head as a plain linear layer, if that is what it is (also one that PEFT trains as a whole)."""
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        enabled = not head.disable_adapters and head.active_adapter in head.modules_to_save  # type: ignore[operator]
        head = head.modules_to_save[head.active_adapter] if enabled else head.original_module  # type: ignore[index,assignment]
    is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    return head if is_linear else None  # type: ignore[return-value]


def score_hidden(
    head: nn.Module,
    hidden: Tensor,
    batch: ModelBatch,
    rule: LogitRule,
    options: ScoreOptions,
    *,
    bias: Tensor | None = None,
) -> dict[str, Any]:
    """Log-probs (or a local loss) of the scored positions, and entropies of the others where all are asked for.

    The fast path for a head that is one weight and one bias; any other module is called chunk by chunk.
    """
    rule = replace(rule, temperature=options.temperature)
    states, targets = hidden[batch.scored.source], batch.scored.target
    wanted = Statistics(options.entropy != "none", options.correct, options.collision, options.mean_logits)
    wants: dict[str, Any] = {"rule": rule, "wanted": wanted}
    products = head_products(head, bias)
    weight, bias = products.weight, products.bias
    if options.loss_of is None:
        if weight is not None:
            scores = token_scores(states, weight, targets, bias=bias, **wants)
        else:
            scores = token_scores_through(products.call, states, targets, **wants)
        found = {**scores._asdict(), "total": None}
    else:
        if weight is not None:
            loss = local_loss(states, weight, targets, options.loss_of, bias=bias, **wants)
        else:
            loss = local_loss_through(products.call, states, targets, options.loss_of, **wants)
        found = {**loss.scores._asdict(), "total": loss.total}
    if options.entropy == "all":
        found["entropy_total"] = _entropy_of_all(products, hidden, batch, rule, found["entropies"])
    return found


class Products(NamedTuple):
    """How hidden states become products: by a weight and bias that can be read, or by a call."""

    weight: Tensor | None
    bias: Tensor | None
    call: AnyHead


def head_products(head: nn.Module, bias: Tensor | None) -> Products:
    """The products of a head, with a bias `(V,)` from outside of it (BART's `final_logits_bias`)."""
    linear = plain_linear(head)
    if linear is None:
        return Products(None, None, head if bias is None else lambda states: head(states) + bias)
    biases = [x for x in (linear.bias, bias) if x is not None]
    total = sum(biases[1:], biases[0]) if biases else None
    return Products(linear.weight, total, lambda states: linear_product(states, linear.weight, total))


@torch.no_grad()
def _entropy_of_all(
    products: Products, hidden: Tensor, batch: ModelBatch, rule: LogitRule, scored: Tensor
) -> Tensor:
    """Sum of the entropies of all real tokens; those of the scored positions are known already."""
    unscored = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)
    unscored[batch.real_tokens] = True
    unscored[batch.scored.source] = False
    states = hidden[unscored.nonzero()[:, 0]]
    if products.weight is not None:
        rest = token_entropies(states, products.weight, bias=products.bias, rule=rule)
    else:
        nowhere = torch.zeros(len(states), dtype=torch.int64, device=hidden.device)
        wanted = Statistics(entropy=True)
        rest = token_scores_through(products.call, states, nowhere, rule=rule, wanted=wanted).entropies
        assert rest is not None
    return scored.sum() + rest.sum()


def router_inputs(core: PreTrainedModel) -> dict[str, bool]:
    """The argument that makes a mixture of experts return its router's logits, where its config asks for them."""
    if not getattr(core.config.get_text_config(), "output_router_logits", False):
        return {}
    accepts = inspect.signature(type(core).forward).parameters
    return {"output_router_logits": True} if "output_router_logits" in accepts else {}


def router_loss(core: PreTrainedModel, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """The load-balancing loss of the model's own module (Switch Transformers, arXiv:2101.03961, eq. 4-6).

    A packed row, whose mask is a segment table or None, has no padding; tokens of a prompt that several sequences share count
    as often as these would repeat it.
    """
    balance = vars(sys.modules[type(core).__module__])["load_balancing_loss_func"]
    mask = attention_mask
    if mask is not None and mask.ndim != 2:
        segments = Segments.from_table(mask)
        mask = segments.uses() if segments.has_shared_prefixes else None
    config = core.config.get_text_config()
    experts = next(
        value for name in ("num_experts", "num_local_experts") if (value := getattr(config, name, None))
    )
    loss = balance(router_logits, experts, config.num_experts_per_tok, mask)
    assert isinstance(loss, Tensor) and math.prod(loss.shape) == 1
    return loss.reshape(())
