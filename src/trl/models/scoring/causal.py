"""The scoring forward: a language model's log-probabilities of given tokens, without its logits.

`Scorer` runs a model's decoder, then the scoring function of `tensors/logprobs.py` on the scored positions only. Both
run inside the model's own `forward` and the head's own `__call__`, so that the hooks of DDP, FSDP2 and ZeRO-3 run. A
model without decoder and head, or with other logits than these give, is scored from its own logits; `fallbacks` says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from trl.models.distributed import is_sharded
from trl.models.packed.layout import Columns, Inputs, ModelBatch, ScoredPositions, packed_batch, without_shared_prefixes
from trl.models.parts import (
    causal_core,
    check_decoder_only,
    decoder_of,
    head_unsupported,
    logit_rule,
    prompt_learning_unsupported,
    replaced_forward,
)
from trl.models.scoring.base import ScorerBase, given_inputs
from trl.models.scoring.head import (
    Reader,
    Results,
    Routing,
    ScoreOptions,
    call_head,
    plain_linear,
    readable_head,
    router_loss,
    score_hidden,
)
from trl.models.switches import holding, in_eval_mode
from trl.models.value_head import SUPPORTED_ARCHITECTURES
from trl.models.value_wrapper import PreTrainedModelWrapper, last_hidden
from trl.tensors.reduce import Weighted, weighted
from trl.tensors.softmax_rows import LogitRule
from trl.tensors.vocabulary_loss import LogitsOf, LossOfLogits, VocabularyLoss, vocabulary_loss


class Scored(NamedTuple):
    """The results of a scoring forward for K scored positions, in the order of `positions`."""

    positions: ScoredPositions
    logps: Tensor  # (K,), nats; with gradient unless a local loss was asked for
    total: Tensor | None  # scalar with gradient: the sum of the local loss
    entropies: Tensor | None  # (K,), nats
    correct: Tensor | None  # (K,) bool: the model's most likely token was the target
    entropy: Weighted | None  # sum over all real tokens, also those that are not scored
    aux_loss: Tensor | None  # scalar with gradient: the router's load-balancing loss, not weighted
    log_collision: Tensor | None = None  # (K,) detached: log of the sum over the vocabulary of p(token)^2
    mean_logits: Tensor | None = None  # (K,) detached: mean of the raw logits over the vocabulary
    values: Tensor | None = None  # (K,) with gradient: the value head at the position that predicts the token


class OwnStates(NamedTuple):
    """Hidden states `(K, H)` from `Scorer.scored_states`; `base`: the head reads them without its adapters."""

    hidden: Tensor
    base: bool = False


class Scorer(ScorerBase):
    """Scores one decoder; layout (packed or padded) and path (head or own logits) are chosen once.

    `packed=None` uses the packed layout if the model supports it, `packed=False` always pads. `fallbacks` lists the
    reasons for fallbacks. PEFT wraps the model before, DDP, FSDP2 and DeepSpeed may afterwards. With a value head
    (`AutoModelForCausalLMWithValueHead`) results also have `values` `(K,)`, float32.
    """

    rule: LogitRule
    bias: Tensor | None = None  # (V,): outside of the head
    _as_language_model: Callable[..., AbstractContextManager[object]]

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0, packed: bool | None = None) -> None:
        self.wrapper: Any = model if isinstance(model, SUPPORTED_ARCHITECTURES) else None
        inner, self._as_language_model = model, nullcontext
        if self.wrapper is not None:
            inner, self._as_language_model = self.wrapper.pretrained_model, partial(_as_language_model, self.wrapper)
        core = causal_core(inner)
        reason = prompt_learning_unsupported(inner) or self._set_up_head(core)
        super().__init__(core, unsupported_reason=reason, pad_token_id=pad_token_id, packed=packed)

    def _set_up_head(self, core: PreTrainedModel) -> str | None:
        """Set `rule`; the reason why it and the head do not give the model's logits, None if they do."""
        check_decoder_only(core)
        self.rule = logit_rule(core.config)
        return head_unsupported(core, self.rule)

    def score(self, model: nn.Module, batch: Columns, options: ScoreOptions | None = None) -> Scored:
        """Score the trained labels of a batch, in either layout, with `model` (the scorer's model, maybe wrapped).

        The results do not depend on the layout. Call it under autocast where the run uses mixed precision.
        """
        rows, options = self.lay_out(batch), options or ScoreOptions()
        if self.group is None:
            return _scored_of(rows, self.through_head(model, rows, partial(score_hidden, rows, options)))
        piece = self.piece_of(rows)
        if options.loss_of is not None:
            options = replace(options, loss_of=piece.loss_of_piece(options.loss_of))
        results = self.through_head(model, piece.rows, partial(score_hidden, piece.rows, options))
        return _scored_of(rows, piece.gather_results(results))

    def score_with_logits(
        self, model: nn.Module, batch: Columns, options: ScoreOptions | None = None
    ) -> tuple[Scored, Tensor]:
        """`score`, and the model's own logits `(B, T, V)` of the padded rows."""
        rows = self.padded(batch)
        outputs = self.outputs(model, rows)
        return self.score_outputs(outputs, rows, options), self.row_logits(outputs, rows)

    def over_chunks(
        self, model: nn.Module, batch: Columns, loss_of: LossOfLogits, *,
        other: tuple[Scorer, nn.Module] | OwnStates | None = None, other_batch: Columns | None = None,
        parts: Sequence[tuple[slice, slice]] | None = None, temperature: float = 1.0,
    ) -> VocabularyLoss:  # fmt: skip
        """Sum of a loss over the whole distributions of one or two models at the scored positions, chunk by chunk.

        `loss_of(logits (C, V), other_logits (C, V') or None, rows)` returns the weighted loss `(C,)` of the scored
        positions `rows`; a token's loss may depend on that token alone. `other`, a scorer and its model, runs in eval
        mode without gradient; states that this model computed before are read through its head. The logits of no model
        are held for all tokens; `model`'s gradients are taken in the same pass. `temperature` divides all logits.

        The other model may score another batch, of other tokens: `parts` are then the chunks, each the scored positions
        of this model and of the other one, and a token's loss may depend on all of its chunk.
        """
        with_gradient, losses = torch.is_grad_enabled(), list[VocabularyLoss]()
        states, second = (other, None) if isinstance(other, OwnStates) else (None, other)
        if second is not None and other_batch is None and self.layout != second[0].layout:
            batch = without_shared_prefixes(batch, pad_token_id=self.pad_token_id)  # one order of positions
        rows, piece = self.rows_here(batch)
        if piece is not None:
            loss_of = piece.loss_of_piece(loss_of)
            states = None if states is None else states._replace(hidden=states.hidden[piece.scored.here])
        vocabulary = self.vocabulary if second is None else max(self.vocabulary, second[0].vocabulary)

        def run(others: Callable[[slice], Tensor] | None) -> VocabularyLoss:
            def read(head: nn.Module, hidden: Tensor, rule: LogitRule, bias: Tensor | None) -> Results:
                _check_whole(head)
                rule = replace(rule, temperature=temperature)
                logits_of = _logits_of(head, rule, bias)
                reads = others if states is None else self._reads_own(states, logits_of, hidden.dtype, rule)
                loss = vocabulary_loss(
                    hidden[rows.scored.source], logits_of, loss_of, parameters=head.parameters(),
                    vocabulary=vocabulary, others=reads, parts=None if parts is None else [part for part, _ in parts],
                )  # fmt: skip
                return {"total": loss.total, "losses": loss.values, "statistics": loss.statistics}

            with torch.set_grad_enabled(with_gradient):
                loss = self.through_head(model, rows, read)
                loss = loss if piece is None else piece.gather_results(loss)
            return VocabularyLoss(loss["total"], loss["losses"], loss["aux_loss"], loss["statistics"])

        if second is None:
            return run(None)
        scorer, other_model = second
        theirs, their_piece = scorer.rows_here(batch if other_batch is None else other_batch)
        places = {part.start: rows for part, rows in parts or ()}

        def read_other(head: nn.Module, hidden: Tensor, rule: LogitRule, bias: Tensor | None) -> Results:
            """The model runs inside the other one's head, where the weights of both are whole."""
            states = hidden[theirs.scored.source]
            if piece is not None and their_piece is not None:  # rows of other prompts are cut elsewhere
                states = their_piece.gather(states)[piece.scored.here]
            logits_of = _logits_of(head, replace(rule, temperature=temperature), bias)
            losses.append(run(lambda part: logits_of(states[places.get(part.start, part)])))
            return {}  # not the loss: FSDP2 would gather the other model for its backward

        with torch.no_grad(), in_eval_mode(other_model):
            scorer.through_head(other_model, theirs, read_other)
        return losses[0]

    @property
    def vocabulary(self) -> int:
        """The number of logits, by which chunks are made."""
        return self.core.config.get_text_config().vocab_size

    @torch.no_grad()
    def scored_states(self, model: nn.Module, batch: Columns) -> Tensor:
        """The hidden states `(K, H)` of the scored positions, for `OwnStates`; without a usable head the logits."""
        rows, piece = self.rows_here(batch)

        def read(head: nn.Module, hidden: Tensor, rule: LogitRule, bias: Tensor | None) -> Results:
            return {"states": hidden[rows.scored.source]}

        states = self.through_head(model, rows, read)["states"]
        return states if piece is None else piece.gather(states)

    def _reads_own(
        self, states: OwnStates, logits_of: LogitsOf, dtype: torch.dtype, rule: LogitRule
    ) -> Callable[[slice], Tensor]:
        """The logits of states that the model computed before; `logits_of`: those of its head as it is now."""
        head: Any = self.core.get_output_embeddings()
        if not (states.base and self.uses_head and hasattr(head, "_disable_adapters")):
            return lambda part: logits_of(states.hidden[part].to(dtype))

        def logits_of_base(part: slice) -> Tensor:
            with holding(head, "_disable_adapters", True):  # PEFT 0.18; its own switch changes requires_grad too
                products = head(states.hidden[part].to(dtype))  # its hooks gather the weights
            return rule.logits(products if self.bias is None else products + self.bias)

        return logits_of_base

    def through_head(self, model: nn.Module, rows: ModelBatch, read: Reader) -> Results:
        """The result of `read` on the decoder's hidden states, inside the model's own forward and the head's own call.

        Where the head cannot be used alone, `read` is given an identity and the model's own logits. Beside it
        `aux_loss`, and `values` of a model with a value head.
        """
        model = self.uncompiled(model)
        if not self.uses_head:
            return self._read_outputs(self.outputs(model, rows), rows, read)

        def forward(**inputs: object) -> Results:
            with self.embedded(rows):
                states, aux_loss = self.hidden_states(given_inputs(inputs), rows)
            hidden, head = states.flatten(0, 1), self.core.get_output_embeddings()
            assert head is not None
            results = call_head(head, hidden, lambda plain, states: read(plain, states, self.rule, self.bias))
            return {"aux_loss": aux_loss, **results, **({} if self.wrapper is None else self._values(hidden, rows))}

        with self._as_language_model(), replaced_forward(self.core, forward):
            return model(**rows.inputs)

    def hidden_states(self, inputs: Inputs, rows: ModelBatch) -> tuple[Tensor, Tensor | None]:
        """The decoder's last hidden states `(B, T, H)`, and a router's loss."""
        outputs = decoder_of(self.core)(**inputs, **self.router, use_cache=False)
        if not self.router:
            return outputs.last_hidden_state, None
        loss, _ = router_loss(self.core, outputs.router_logits, rows, self.routing_of_step)
        return outputs.last_hidden_state, loss

    def routing(self, model: nn.Module, batch: Columns) -> Routing:
        """The routing of a batch's tokens, without a loss."""
        rows, _ = self.rows_here(batch)

        def forward(**inputs: object) -> Routing:
            with self.embedded(rows):
                decoder = decoder_of(self.core)
                outputs = decoder(**given_inputs(inputs), **self.router, use_cache=False)
            return router_loss(self.core, outputs.router_logits, rows)[1]

        with self._as_language_model(), replaced_forward(self.core, forward):
            return self.uncompiled(model)(**rows.inputs)

    # ---- from the model's own logits

    def outputs(self, model: nn.Module, rows: ModelBatch) -> Any:
        """The model's own outputs for padded rows, with all their logits."""
        if self.group is not None:
            return self._gathered_outputs(model, rows)
        with self._as_language_model(True), self.embedded(rows):
            return model(**self.own_inputs(rows), use_cache=False)

    def _gathered_outputs(self, model: nn.Module, rows: ModelBatch) -> MoeCausalLMOutputWithPast:
        """Logits of padded rows, of which each process computes those of a piece and is given all."""

        def read(head: nn.Module, hidden: Tensor, rule: LogitRule, bias: Tensor | None) -> Results:
            return {"logits": _logits_of(head, rule, bias)(hidden)}

        piece = self.piece_of(packed_batch(rows.inputs, with_table=True))
        results = self.through_head(model, piece.rows, read)
        logits = piece.all_tokens(results["logits"])
        padded = logits.new_zeros((rows.inputs["input_ids"].numel(), logits.shape[1]))
        padded = padded.index_copy(0, rows.real_tokens, logits)
        logits = padded.view(*rows.inputs["input_ids"].shape, -1)
        return MoeCausalLMOutputWithPast(logits=logits, aux_loss=results["aux_loss"])  # pyright: ignore[reportArgumentType]

    def own_inputs(self, rows: ModelBatch) -> Inputs:
        """The arguments of the model's own forward."""
        return {**rows.inputs, **self.router}

    def row_logits(self, outputs: Any, rows: ModelBatch) -> Tensor:
        """The logits `(B, T, V)` of the rows' own tokens; prompt tuning puts virtual tokens in front."""
        return outputs.logits[:, -rows.width :]

    def score_outputs(self, outputs: Any, rows: ModelBatch, options: ScoreOptions | None = None) -> Scored:
        """Score padded rows from the model's own outputs."""
        read = partial(score_hidden, rows, options or ScoreOptions())
        return _scored_of(rows, self._read_outputs(outputs, rows, read))

    def _read_outputs(self, outputs: Any, rows: ModelBatch, read: Reader) -> Results:
        logits = self.row_logits(outputs, rows).flatten(0, 1)
        results = read(nn.Identity(), logits, LogitRule(), None)
        results = {"aux_loss": getattr(outputs, "aux_loss", None), **results}
        if self.wrapper is None:
            return results
        return results | self._values(last_hidden(outputs)[:, -rows.width :].flatten(0, 1), rows)

    # ---- a value head

    def _values(self, hidden: Tensor, rows: ModelBatch) -> dict[str, Tensor]:
        return {"values": self.wrapper.v_head(hidden[rows.scored.source]).squeeze(-1)}


def _as_language_model(wrapper: PreTrainedModelWrapper, with_states: bool = False) -> AbstractContextManager[None]:
    """Let a wrapper with a value head return what the model inside returns, perhaps with all hidden states."""
    wanted = {"output_hidden_states": True} if with_states else {}
    return replaced_forward(wrapper, lambda **inputs: wrapper.pretrained_model(**inputs, **wanted))


def _check_whole(head: nn.Module) -> None:
    if plain_linear(head) is None and is_sharded(head):
        fault = f"the output head is a sharded {type(head).__name__}"
        raise ValueError(f"{fault}. Take it out of the adapter (target_modules).")


def _logits_of(head: nn.Module, rule: LogitRule, bias: Tensor | None) -> LogitsOf:
    """Hidden states `(C, H)` to logits `(C, V)`, in float32 or wider, with gradient."""
    weight, bias = readable_head(head, bias)
    if isinstance(weight, Tensor):
        return lambda states: rule.logits(linear(states, weight, bias))
    return lambda states: rule.logits(weight(states))


def _scored_of(batch: ModelBatch, results: Results) -> Scored:
    """The result of `score_hidden` with its positions; the entropy of all tokens with their number."""
    values = {**results}
    total = values.pop("entropy_total", None)
    count = torch.tensor(batch.real_tokens.numel(), device=batch.real_tokens.device)
    return Scored(batch.scored, entropy=None if total is None else Weighted(total, count), **values)


def mean_logits(scored: Scored, completion: Tensor | None = None) -> dict[str, Weighted]:
    """`logits/chosen` and `logits/rejected`: the mean logit over the vocabulary and the scored positions of each kind.

    `completion` bool `(K,)`: the positions that count, where others are scored too.
    """
    assert scored.mean_logits is not None
    is_chosen = scored.positions.sequence % 2 == 0
    counted = torch.ones_like(is_chosen) if completion is None else completion
    masks = {"chosen": is_chosen & counted, "rejected": ~is_chosen & counted}
    return {f"logits/{name}": weighted(scored.mean_logits, mask) for name, mask in masks.items()}
