"""Log-probabilities or a local loss from hidden states and output head, and a router's loss."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.models.packed.layout import ModelBatch
from trl.models.packed.sequence_group import SequenceGroup
from trl.models.parts import IN_FLOAT32, replaced_forward
from trl.tensors.logprobs import AnyHead, LossOf, local_loss, token_scores
from trl.tensors.segments import Segments
from trl.tensors.softmax_rows import LogitRule, Statistics

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
    is_wide = hasattr(plain, IN_FLOAT32)
    precision = torch.autocast(hidden.device.type, enabled=False) if is_wide else nullcontext()
    with precision, replaced_forward(plain, lambda states: function(plain, states)):
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
    weight, bias = readable_head(head, bias)
    if options.loss_of is None:
        scores, total = token_scores(states, weight, targets, bias=bias, rule=rule, wanted=wanted), None
    else:
        total, _, scores = local_loss(states, weight, targets, options.loss_of, bias=bias, rule=rule, wanted=wanted)
    results = {**scores._asdict(), "total": total}
    if options.entropy == "all":
        assert scores.entropies is not None
        unscored = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        unscored[batch.real_tokens] = True
        unscored[batch.scored.source] = False
        with torch.no_grad():
            rest = hidden[unscored]
            nowhere = torch.zeros(len(rest), dtype=torch.int64, device=hidden.device)
            entropy = Statistics(entropy=True)
            others = token_scores(rest, weight, nowhere, bias=bias, rule=rule, wanted=entropy).entropies
            assert others is not None
            results["entropy_total"] = scores.entropies.sum() + others.sum()
    return results


def readable_head(head: nn.Module, bias: Tensor | None) -> tuple[Tensor | AnyHead, Tensor | None]:
    """Weight and bias of a head, with a bias `(V,)` from outside of it (BART's `final_logits_bias`).

    A head whose weight cannot be read is a function, which adds the bias itself.
    """
    linear = plain_linear(head)
    if linear is None:
        return (head if bias is None else lambda states: head(states) + bias), None
    biases = [x for x in (linear.bias, bias) if x is not None]
    return linear.weight, sum(biases[1:], biases[0]) if biases else None


class Routing(NamedTuple):
    """How often each expert was chosen, int64 `(E,)`, and for how many tokens; both summed over the layers."""

    chosen: Tensor
    tokens: Tensor


def router_inputs(core: PreTrainedModel) -> dict[str, bool]:
    """The argument that makes a mixture of experts return its router's logits, where its config asks for them.

    For some decoders transformers has no such loss (GLM-4-MoE, DeepSeek, Llama 4).
    """
    if not getattr(core.config.get_text_config(), "output_router_logits", False):
        return {}
    has_loss = "output_router_logits" in inspect.signature(type(core).forward).parameters
    has_loss &= "load_balancing_loss_func" in vars(sys.modules[type(core).__module__])
    return {"output_router_logits": True} if has_loss else {}


def router_loss(
    core: PreTrainedModel, router_logits: Sequence[Tensor], rows: ModelBatch, of_step: Routing | None = None
) -> tuple[Tensor, Routing]:
    """The load-balancing loss of a batch's real tokens, and their routing.

    `E sum_e f_e P_e`: f_e is how often a token chose expert e, P_e the mean of its softmax, over all tokens and layers.
    A token of a shared prompt counts once per branch; all pieces of a row have the loss of the row. A product of means
    is not the mean of the products of batches. With f `of_step` it is: the losses of a step's batches, weighted by
    their tokens, add up to that of the step, and so do their gradients, as f has none.

    `router_logits`: of each layer `(tokens, E)`, with padding. Raises: ValueError for others (product keys). Source:
    Switch Transformers, arXiv:2101.03961, eq. 4-6, over all choices and layers at once, as in transformers.
    """
    text, weights = core.config.get_text_config(), _uses(rows)
    choices: int = getattr(core, "num_experts_per_tok", None) or text.num_experts_per_tok
    chosen, probabilities = torch.zeros((), dtype=torch.int64), torch.zeros(())
    for logits in router_logits:
        if logits.shape[:-1].numel() != len(weights):
            raise ValueError(
                f"the router of {type(core).__name__} gives logits {tuple(logits.shape)}, expected ({len(weights)}, "
                "experts). Set output_router_logits=False."
            )
        logits = logits.flatten(0, -2).to(weights.device)
        shares = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        counts = torch.zeros(logits.shape[-1], dtype=torch.int64, device=weights.device)
        experts = shares.topk(choices, dim=-1).indices.flatten()
        chosen = chosen + counts.index_add(0, experts, weights.repeat_interleave(choices))
        probabilities = probabilities + weights.to(shares.dtype) @ shares
    routing = Routing(chosen, weights.sum() * len(router_logits))
    if rows.shared is not None:
        probabilities, *counts = map(rows.shared.group.sum, (probabilities, *routing))
        routing = Routing(*counts)
    counted = of_step or routing
    often = (counted.chosen / counted.tokens).to(probabilities)
    return len(often) * (often * probabilities).sum() / routing.tokens, routing


def _uses(rows: ModelBatch) -> Tensor:
    """The number of sequences of each position, flattened, int64 `(tokens,)`; 0 for padding and filler."""
    uses = torch.zeros_like(rows.sequence_lengths)
    uses[rows.real_tokens] = 1
    table = rows.inputs.get("attention_mask")
    if table is not None and table.ndim == 4:
        group, table = SequenceGroup.of_table(table)
        uses_of_row = Segments(table).uses().to(uses.device)
        uses *= uses_of_row if group is None else group.cut(uses_of_row, 0)
    return uses
