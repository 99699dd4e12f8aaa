"""The scoring forward of classifiers: logits of whole sequences (reward models) or of labelled tokens.

`ClassificationScorer` runs a decoder once over a batch in either layout, shared prefixes included, and then the
classification head on the wanted positions only, inside the model's own `forward` and the head's own `__call__`, so
that the hooks of DDP, FSDP2 and ZeRO-3 fire. Sequences end where their mask or position says, never where a pad token
stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.models.packed.layout import Columns, ModelBatch, ScoredPositions
from trl.models.packed.support import packing_of
from trl.models.parts import causal_core, logits_unsupported, prompt_learning_unsupported, replaced_forward
from trl.models.scoring.base import ScorerBase, given_inputs
from trl.models.switches import holding
from trl.tensors.softmax_rows import LogitRule

_HEAD_NAMES = ("score", "classifier")
_OF_TOKENS = ("labels", "scored_source", "scored_target", "scored_sequence")


class ClassificationScorer(ScorerBase):
    """`Scorer` of a sequence or token classifier.

    A decoder with a linear head gives the logits of its sequences' ends and of any token alike. Other classifiers
    (encoders) are run as they are on padded rows, which `fallbacks` says. Raises ValueError for prompt learning.
    """

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0, packed: bool | None = None) -> None:
        core = causal_core(model)
        if core.can_generate() or core.base_model is core:
            raise TypeError(
                f"model must be a sequence or token classifier, got {type(core).__name__}. "
                "Use AutoModelForSequenceClassification."
            )
        if reason := prompt_learning_unsupported(model):
            raise ValueError(f"{reason}, which classifiers do not support. Use LoRA, or train all weights.")
        head, reason = (head_of(core), f"it has no classification head under the names {' or '.join(_HEAD_NAMES)}")
        if head is not None:
            reason = logits_unsupported(core, [core.base_model], head, LogitRule())
        super().__init__(core, unsupported_reason=reason, pad_token_id=pad_token_id, packed=packed)

    def score(self, model: nn.Module, batch: Columns) -> Tensor:
        """Logits `(S, C)` at the end of every sequence (row, segment or branch), in the model's dtype, with gradient.

        Raises: ValueError where a row has no real token.
        """
        mask = batch.get("attention_mask")
        if mask is not None and (empty := (mask.sum(dim=1) == 0).nonzero()[:, 0].tolist()):
            raise ValueError(f"every row must have a real token, got none in rows {empty}. Leave them out.")
        laid_out = self.lay_out({name: value for name, value in batch.items() if name not in _OF_TOKENS})
        if self.uses_head:
            return self._at(model, laid_out, laid_out.sequence_ends)
        return self._own_sequence_logits(model, laid_out)

    def score_tokens(self, model: nn.Module, batch: Columns) -> tuple[Tensor, Tensor]:
        """Logits `(K, C)` and labels `(K,)` of the tokens whose label is not -100, with gradient.

        Raises: ValueError for a batch without labels, TypeError for a model that gives one logit row per sequence only.
        """
        if batch.get("labels") is None:
            raise ValueError(f"a batch for token classification must have 'labels', got {sorted(batch)}.")
        laid_out = self.lay_out(batch, shifted=False)
        return self._at_scored(model, laid_out), laid_out.scored.target

    def score_predictors(self, model: nn.Module, batch: Columns) -> tuple[Tensor, ScoredPositions]:
        """Logits `(K, C)` one token before each trained label, with gradient: a value model's values.

        `batch` is one of a language model, with shifted labels; the positions are those of `Scorer.score`. Raises
        TypeError for a model that gives one logit row per sequence only.
        """
        laid_out = self.lay_out(batch)
        return self._at_scored(model, laid_out), laid_out.scored

    def _at_scored(self, model: nn.Module, batch: ModelBatch) -> Tensor:
        """Logits `(K, C)` at the scored positions."""
        if self.uses_head:
            return self._at(model, batch, batch.scored.source)
        logits = self._own_logits(model, batch)
        if logits.ndim != 3:
            raise TypeError(
                f"model must give logits per token, got {type(self.core).__name__}. "
                "Use AutoModelForTokenClassification."
            )
        return logits.flatten(0, 1)[batch.scored.source]

    def _at(self, model: nn.Module, batch: ModelBatch, positions: Tensor) -> Tensor:
        """Logits `(K, C)` at flattened positions `(K,)`, of which each process of a group computes its own."""
        if self.group is None:
            return self._through_head(model, batch, positions)
        piece = self.piece_of(batch)
        here, places = piece.places(positions)
        return piece.gather(self._through_head(model, piece.rows, here), places)

    def _through_head(self, model: nn.Module, batch: ModelBatch, positions: Tensor) -> Tensor:
        """Logits `(K, C)` of the decoder's hidden states at flattened positions `(K,)`."""
        core: Any = self.core
        cache = {"use_cache": False} if getattr(core.config.get_text_config(), "use_cache", False) else {}

        def forward(**inputs: object) -> dict[str, Tensor]:
            with self.embedded(batch), self._final_norm_at(positions) as is_cut:
                outputs = core.base_model(**given_inputs(inputs), **cache)
            states = outputs.last_hidden_state.flatten(0, 1)
            states = states if is_cut else states[positions]
            if isinstance(getattr(core, "dropout", None), nn.Dropout):
                states = core.dropout(states)
            head = head_of(core)
            assert head is not None
            return {"logits": head(states)}

        with replaced_forward(self.core, forward):
            return self.uncompiled(model)(**batch.inputs)["logits"]

    @cached_property
    def _final_norm(self) -> nn.Module | None:
        name = packing_of(self.core).ends_in
        return None if name is None else self.core.base_model.get_submodule(name)

    @contextmanager
    def _final_norm_at(self, positions: Tensor) -> Iterator[bool]:
        """A block in which the decoder's last norm, where it is known (True), computes these positions `(K,)` only.

        The decoder then returns hidden states `(1, K, H)`; positions are those of the flattened rows.
        """
        norm = self._final_norm
        if norm is None:
            yield False
            return
        whole = norm.forward
        with replaced_forward(norm, lambda states: whole(states.flatten(0, 1)[positions][None])):
            yield True

    def _own_logits(self, model: nn.Module, rows: ModelBatch) -> Tensor:
        """The model's own logits: `(B, C)`, or `(B, T, C)` of the rows' own tokens."""
        with self.embedded(rows):
            logits = model(**rows.inputs).logits
        return logits if logits.ndim == 2 else logits[:, -rows.width :]

    def _own_sequence_logits(self, model: nn.Module, rows: ModelBatch) -> Tensor:
        """The model's own logits `(B, C)` of padded rows.

        Decoders among such models find a row's end as its last token that is not the pad token of the config. So rows
        are padded with a token that no row ends with, and the config names it for this call.
        """
        ids, config = rows.inputs["input_ids"], self.core.config.get_text_config()
        last = set(ids.flatten()[rows.sequence_ends].tolist())
        filler = next(token for token in (self.pad_token_id, *range(len(last) + 1)) if token not in last)
        ids = ids.masked_fill(rows.inputs["attention_mask"] == 0, filler)
        with holding(config, "pad_token_id", filler):
            logits = self._own_logits(model, replace(rows, inputs={**rows.inputs, "input_ids": ids}))
        return logits if logits.ndim == 2 else logits.flatten(0, 1)[rows.sequence_ends]


def head_of(core: PreTrainedModel) -> nn.Module | None:
    """The module that turns hidden states into class logits, under the names transformers gives it."""
    heads = (getattr(core, name, None) for name in _HEAD_NAMES)
    return next((head for head in heads if isinstance(head, nn.Module)), None)
