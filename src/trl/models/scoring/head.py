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

from trl.models.packed.layout import ModelBatch
from trl.models.parts import as_the_head_wants, replaced_forward
from trl.tensors.logprobs import (
    AnyHead,
    LocalLoss,
    LossOf,
    local_loss,
    local_loss_through,
    token_scores,
    token_scores_through,
)
from trl.tensors.segments import Segments
from trl.tensors.softmax_rows import LogitRule, Statistics, TokenScores

Results = dict[str, Any]
"""What a reader gives, by the names of `Scored`'s fields."""
Reader = Callable[[nn.Module, Tensor, LogitRule, Tensor | None], Results]
"""(head, hidden states (tokens, H), rule of the logits, bias outside of the head) -> results."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Results beside the log-probabilities.

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


def call_head(head: nn.Module, hidden: Tensor, function: Callable[[nn.Module, Tensor], Results]) -> Results:
    """`function(head, hidden (tokens, H))` as the head's own forward; a head that PEFT saves is the layer inside."""
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
    batch: ModelBatch, options: ScoreOptions, head: nn.Module, hidden: Tensor, rule: LogitRule, bias: Tensor | None
) -> Results:
    """Log-probs (or a local loss) of the scored positions, and entropies of the others where all are asked for."""
    rule = replace(rule, temperature=options.temperature)
    states, targets = hidden[batch.scored.source], batch.scored.target
    wanted = Statistics(options.entropy != "none", options.correct, options.collision, options.mean_logits)
    products = head_products(head, bias)
    if options.loss_of is None:
        scores, total = products.token_scores(states, targets, rule=rule, wanted=wanted), None
    else:
        total, _, scores = products.local_loss(states, targets, options.loss_of, rule=rule, wanted=wanted)
    results = {**scores._asdict(), "total": total}
    if options.entropy == "all":
        assert scores.entropies is not None
        unscored = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        unscored[batch.real_tokens] = True
        unscored[batch.scored.source] = False
        with torch.no_grad():
            rest = hidden[unscored]
            nowhere = torch.zeros(len(rest), dtype=torch.int64, device=hidden.device)
            others = products.token_scores(rest, nowhere, rule=rule, wanted=Statistics(entropy=True)).entropies
            assert others is not None
            results["entropy_total"] = scores.entropies.sum() + others.sum()
    return results


class Products(NamedTuple):
    """Products of hidden states and a head: by a weight and bias that can be read (the fast path), or by a call."""

    weight: Tensor | None
    bias: Tensor | None
    call: AnyHead

    def token_scores(self, hidden: Tensor, targets: Tensor, **options: Any) -> TokenScores:
        """Log-probs of the targets `(K,)`."""
        if self.weight is None:
            return token_scores_through(self.call, hidden, targets, **options)
        return token_scores(hidden, self.weight, targets, bias=self.bias, **options)

    def local_loss(self, hidden: Tensor, targets: Tensor, loss_of: LossOf, **options: Any) -> LocalLoss:
        """The sum of a loss that is local to each token."""
        if self.weight is None:
            return local_loss_through(self.call, hidden, targets, loss_of, **options)
        return local_loss(hidden, self.weight, targets, loss_of, bias=self.bias, **options)


def head_products(head: nn.Module, bias: Tensor | None) -> Products:
    """The products of a head, with a bias `(V,)` from outside of it (BART's `final_logits_bias`)."""
    linear = plain_linear(head)
    if linear is None:
        return Products(None, None, head if bias is None else lambda states: head(states) + bias)
    biases = [x for x in (linear.bias, bias) if x is not None]
    total = sum(biases[1:], biases[0]) if biases else None
    return Products(linear.weight, total, lambda states: linear_product(states, linear.weight, total))


def router_inputs(core: PreTrainedModel) -> dict[str, bool]:
    """The argument that makes a mixture of experts return its router's logits, where its config asks for them."""
    if not getattr(core.config.get_text_config(), "output_router_logits", False):
        return {}
    accepts = inspect.signature(type(core).forward).parameters
    return {"output_router_logits": True} if "output_router_logits" in accepts else {}


def router_loss(core: PreTrainedModel, router_logits: tuple[Tensor, ...], attention_mask: Tensor | None) -> Tensor:
    """The load-balancing loss of the model's own module (Switch Transformers, arXiv:2101.03961, eq. 4-6).

    Packed rows have no padding; tokens of a shared prompt count once per branch.
    """
    balance = vars(sys.modules[type(core).__module__])["load_balancing_loss_func"]
    mask = attention_mask
    if mask is not None and mask.ndim != 2:
        segments = Segments.from_table(mask)
        mask = segments.uses() if segments.has_shared_prefixes else None
    config = core.config.get_text_config()
    experts = next(value for name in ("num_experts", "num_local_experts") if (value := getattr(config, name, None)))
    loss = balance(router_logits, experts, config.num_experts_per_tok, mask)
    assert isinstance(loss, Tensor) and math.prod(loss.shape) == 1
    return loss.reshape(())
