"""The scoring forward: a causal language model's log-probabilities of given tokens, without its logits.

`Scorer` runs a model's decoder and then the scoring primitive of `tensors/logprobs.py` on the scored positions only.
Both run inside the model's own `forward` and the head's own `__call__`, so that the hooks of DDP, FSDP2 and ZeRO-3
fire: parameters are gathered, gradients reduced, exactly as in a plain call. A model that does not expose a decoder
and a head, or whose logits are not what its head and config say, is scored from its own logits instead; the scorer
says so once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trl.models.packed.layout import ModelBatch, ScoredPositions, padded_batch
from trl.models.parts import (
    causal_core,
    check_decoder_only,
    decoder_of,
    head_obstacle,
    logit_rule,
    prompt_learning_obstacle,
    replaced_forward,
)
from trl.models.scoring.base import ScorerBase, given_inputs
from trl.models.scoring.head import ScoreOptions, call_head, router_inputs, router_loss, score_hidden
from trl.tensors.reduce import Weighted
from trl.tensors.softmax_rows import LogitRule


class Scored(NamedTuple):
    """What a scoring forward found, for K scored positions in the order of `positions`."""

    positions: ScoredPositions
    logps: Tensor  # (K,), nats; with gradient unless a local loss was asked for
    total: Tensor | None  # scalar with gradient: the sum of the local loss
    entropies: Tensor | None  # (K,), nats
    correct: Tensor | None  # (K,) bool: the model's most likely token was the target
    entropy: Weighted | None  # sum over all real tokens, also those that are not scored
    aux_loss: Tensor | None  # scalar with gradient: the router's load-balancing loss, not weighted
    log_collision: Tensor | None = None  # (K,) detached: log of the sum over the vocabulary of p(token)^2
    mean_logits: Tensor | None = None  # (K,) detached: mean of the raw logits over the vocabulary
    values: Tensor | None = None  # (K,) with gradient: what a value head says where the token is predicted


class Scorer(ScorerBase):
    """How one model is scored, decided once: layout (flat or padded) and path (head or own logits).

    `flat=None` takes the flat layout wherever the model can; `flat=False` always pads. `fallbacks` holds, in words,
    what the model could not take. The model may be wrapped afterwards (PEFT before, DDP, FSDP2, DeepSpeed after).

    Example:
        >>> scorer = Scorer(model, pad_token_id=tokenizer.pad_token_id)  # doctest: +SKIP
        >>> scorer.score(model, batch).logps  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0, flat: bool | None = None) -> None:
        core = causal_core(model)
        check_decoder_only(core)
        self.rule = logit_rule(core.config)
        obstacle = prompt_learning_obstacle(model) or head_obstacle(core, self.rule)
        super().__init__(core, obstacle=obstacle, pad_token_id=pad_token_id, flat=flat)

    def score(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> Scored:
        """Score the trained labels of a batch, in either layout, with `model` (the scorer's model, maybe wrapped).

        The returned loss and metrics do not depend on the layout. Call it under autocast where the run uses mixed
        precision.
        """
        options = options or ScoreOptions()
        laid_out = self.lay_out(batch)
        model = self.uncompiled(model)
        if not self.uses_head:
            return self.score_outputs(self.outputs(model, laid_out), laid_out, options)

        def forward(**inputs: Any) -> dict[str, Tensor | None]:
            return self._forward(inputs, laid_out, options)

        with replaced_forward(self.core, forward):
            found = model(**laid_out.inputs)
        return scored_of(laid_out, found)

    def score_with_logits(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> tuple[Scored, Tensor]:
        """The same, and the model's own logits `(B, T, V)` of the padded rows: for those who ask for logits."""
        rows = padded_batch(batch, pad_token_id=self.pad_token_id)
        outputs = self.outputs(model, rows)
        return self.score_outputs(outputs, rows, options or ScoreOptions()), self.row_logits(outputs, rows)

    def outputs(self, model: nn.Module, rows: ModelBatch) -> Any:
        """The model's own outputs for padded rows, with all their logits."""
        with self.embedded(rows):
            return model(**rows.inputs, **router_inputs(self.core), use_cache=False)

    def row_logits(self, outputs: Any, rows: ModelBatch) -> Tensor:
        """The logits `(B, T, V)` of the rows' own tokens; prompt tuning puts virtual tokens in front."""
        return outputs.logits[:, -rows.inputs["input_ids"].shape[1] :]

    def score_outputs(self, outputs: Any, rows: ModelBatch, options: ScoreOptions) -> Scored:
        """Score padded rows from the model's own outputs."""
        logits = self.row_logits(outputs, rows).flatten(0, 1)
        found = score_hidden(nn.Identity(), logits, rows, LogitRule(), options)
        found["aux_loss"] = getattr(outputs, "aux_loss", None)
        return scored_of(rows, found)

    def _forward(self, inputs: dict[str, Any], batch: ModelBatch, options: ScoreOptions) -> dict[str, Any]:
        """Stands in for the model's own forward: decoder, then the head over chunks of the scored positions."""
        router = router_inputs(self.core)
        with self.embedded(batch):
            outputs = decoder_of(self.core)(**given_inputs(inputs), **router, use_cache=False)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        found = self.through_head(hidden, batch, options)
        if router:
            found["aux_loss"] = router_loss(self.core, outputs.router_logits, inputs.get("attention_mask"))
        return found

    def through_head(self, hidden: Tensor, batch: ModelBatch, options: ScoreOptions) -> dict[str, Any]:
        """What is found of the decoder's hidden states `(tokens, H)`; called inside the model's own forward."""
        head = self.core.get_output_embeddings()
        assert head is not None
        return call_head(head, hidden, batch, self.rule, options)


def scored_of(batch: ModelBatch, found: Mapping[str, Any]) -> Scored:
    """What `score_hidden` found of a batch, with its positions; the entropy of all tokens comes with their number."""
    values = {"aux_loss": None, **found}
    total = values.pop("entropy_total", None)
    count = torch.tensor(batch.real_tokens.numel(), device=batch.real_tokens.device)
    return Scored(batch.scored, entropy=None if total is None else Weighted(total, count), **values)
