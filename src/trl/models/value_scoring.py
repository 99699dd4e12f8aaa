"""Log-probabilities and values of given tokens in one forward of a model with a value head, without its logits.

The decoder runs once over a flat or padded batch; the scoring primitive and the value head then see the scored positions
only. The value of a token is that of the state before it, at the position that predicts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trl.models.packed.layout import ModelBatch
from trl.models.parts import replaced_forward
from trl.models.scoring.causal import Scored, Scorer
from trl.models.scoring.encoder_decoder import Seq2SeqScorer
from trl.models.scoring.head import ScoreOptions
from trl.models.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    last_hidden,
)

if TYPE_CHECKING:
    _Scorer = Scorer
else:
    _Scorer = object

ModelWithValueHead = AutoModelForCausalLMWithValueHead | AutoModelForSeq2SeqLMWithValueHead


class _AddsValues(_Scorer):
    """Mixin in front of a scorer: its results also have `values` `(K,)`, float32, with gradient."""

    wrapper: ModelWithValueHead

    def score(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> Scored:
        """Score the trained labels of a batch with `model` (the scorer's model, maybe wrapped by DDP and its kin)."""
        with _as_language_model(self.wrapper, self.uses_head):
            return super().score(model, batch, options)

    def score_with_logits(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> tuple[Scored, Tensor]:
        """The same, and the model's own logits: `(B, T, V)` of padded rows, or `(S, T, V)` of completions."""
        with _as_language_model(self.wrapper, uses_head=False):
            return super().score_with_logits(model, batch, options)

    def through_head(self, hidden: Tensor, batch: ModelBatch, options: ScoreOptions) -> dict[str, Any]:
        """Log-probs and values of the decoder's hidden states `(tokens, H)`."""
        found = super().through_head(hidden, batch, options)
        return found | {"values": values_at(self.wrapper, hidden, batch)}

    def score_outputs(self, outputs: Any, rows: ModelBatch, options: ScoreOptions) -> Scored:
        """Score padded rows from the model's own outputs, hidden states among them."""
        scored = super().score_outputs(outputs, rows, options)
        own = rows.inputs.get("decoder_input_ids", rows.inputs["input_ids"]).shape[1]
        hidden = last_hidden(outputs)[:, -own:].flatten(0, 1)
        return scored._replace(values=values_at(self.wrapper, hidden, rows))


class ValueScorer(_AddsValues, Scorer):
    """A `Scorer` whose results also have `values` `(K,)`, float32, with gradient.

    Example:
        >>> scorer = ValueScorer(model, pad_token_id=tokenizer.pad_token_id)  # doctest: +SKIP
        >>> scored = scorer.score(model, batch)  # doctest: +SKIP
        >>> scored.logps, scored.values, scored.positions.sequence  # doctest: +SKIP
    """

    def __init__(
        self, model: AutoModelForCausalLMWithValueHead, *, pad_token_id: int = 0, flat: bool | None = None
    ) -> None:
        super().__init__(model.pretrained_model, pad_token_id=pad_token_id, flat=flat)
        self.wrapper = model


class Seq2SeqValueScorer(_AddsValues, Seq2SeqScorer):
    """A `Seq2SeqScorer` whose results also have `values` `(K,)`, of the decoder's states."""

    def __init__(self, model: AutoModelForSeq2SeqLMWithValueHead, *, pad_token_id: int = 0) -> None:
        super().__init__(model.pretrained_model, pad_token_id=pad_token_id)
        self.wrapper = model


def value_scorer(
    model: ModelWithValueHead, *, pad_token_id: int = 0, flat: bool | None = None
) -> ValueScorer | Seq2SeqValueScorer:
    """The scorer of a decoder or an encoder-decoder with a value head; the latter's rows are always padded."""
    if isinstance(model, AutoModelForSeq2SeqLMWithValueHead):
        return Seq2SeqValueScorer(model, pad_token_id=pad_token_id)
    return ValueScorer(model, pad_token_id=pad_token_id, flat=flat)


def values_at(wrapper: ModelWithValueHead, hidden: Tensor, batch: ModelBatch) -> Tensor:
    """The head's values of the states `(tokens, H)` that predict the scored tokens, `(K,)`."""
    return wrapper.v_head(hidden[batch.scored.source]).squeeze(-1)


@contextmanager
def _as_language_model(wrapper: ModelWithValueHead, uses_head: bool) -> Iterator[None]:
    """Let the wrapper's forward hand on what the model inside returns, with hidden states unless a scorer stands in it."""
    wanted = {} if uses_head else {"output_hidden_states": True}

    def forward(**inputs: Any) -> Any:
        return wrapper.pretrained_model(**inputs, **wanted)

    with replaced_forward(wrapper, forward):
        yield
