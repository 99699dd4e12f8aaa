"""The scoring forward: a causal language model's log-probabilities of given tokens, without its logits.

`Scorer` runs a model's decoder and then the scoring primitive of `tensors/logprobs.py` on the scored positions only.
Both run inside the model's own `forward` and the head's own `__call__`, so that the hooks of DDP, FSDP2 and ZeRO-3
fire: parameters are gathered, gradients reduced, exactly as in a plain call. A model that does not expose a decoder
and a head, or whose logits are not what its head and config say, is scored from its own logits instead; the scorer
says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trl.models.attention import flat_obstacle, use_flat_attention
from trl.models.layout import ModelBatch, ScoredPositions, flat_batch, padded_batch, padded_rows
from trl.models.parts import (
    causal_core,
    check_decoder_only,
    decoder_of,
    head_obstacle,
    logit_rule,
    prompt_learning_obstacle,
    replaced_forward,
)
from trl.models.scored_head import ScoreOptions, call_head, router_inputs, router_loss, score_hidden
from trl.tensors.reduce import Weighted
from trl.tensors.softmax_rows import LogitRule

logger = logging.getLogger(__name__)


class Scored(NamedTuple):
    """What a scoring forward found, for K scored positions in the order of `positions`."""

    positions: ScoredPositions
    logps: Tensor  # (K,), nats; with gradient unless a local loss was asked for
    total: Tensor | None  # scalar with gradient: the sum of the local loss
    entropies: Tensor | None  # (K,), nats
    correct: Tensor | None  # (K,) bool: the model's most likely token was the target
    entropy: Weighted | None  # sum over all real tokens, also those that are not scored
    aux_loss: Tensor | None  # scalar with gradient: the router's load-balancing loss, not weighted


class Scorer:
    """How one model is scored, decided once: layout (flat or padded) and path (head or own logits).

    `flat=None` takes the flat layout wherever the model can; `flat=False` always pads. `fallbacks` holds, in words,
    what the model could not take. The model may be wrapped afterwards (PEFT before, DDP, FSDP2, DeepSpeed after).

    Example:
        >>> scorer = Scorer(model, pad_token_id=tokenizer.pad_token_id)  # doctest: +SKIP
        >>> scorer.score(model, batch).logps  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0, flat: bool | None = None) -> None:
        self.core = causal_core(model)
        check_decoder_only(self.core)
        self.pad_token_id = pad_token_id
        self.neftune_alpha: float | None = None
        self.fallbacks: list[str] = []
        self.rule = logit_rule(self.core.config)
        obstacle = prompt_learning_obstacle(model) or head_obstacle(self.core, self.rule)
        self.uses_head = obstacle is None
        if obstacle:
            self.fallbacks.append(f"it is scored from its own logits, because {obstacle}")
        obstacle = "it is scored from its own logits" if not self.uses_head else flat_obstacle(self.core)
        self.flat = flat is not False and obstacle is None
        if flat is not False and obstacle:
            self.fallbacks.append(f"its batches are padded, because {obstacle}")
        self._needs_table = self.flat and use_flat_attention(self.core)

    def score(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> Scored:
        """Score the trained labels of a batch, in either layout, with `model` (the scorer's model, maybe wrapped).

        The returned loss and metrics do not depend on the layout. Call it under autocast where the run uses mixed
        precision.
        """
        options = options or ScoreOptions()
        laid_out = self.lay_out(batch)
        model = self._without_compiler(model)
        if not self.uses_head:
            return self.score_outputs(self.outputs(model, laid_out), laid_out, options)

        def forward(**inputs: Any) -> dict[str, Tensor | None]:
            return self._forward(inputs, laid_out, options)

        with replaced_forward(self.core, forward):
            found = model(**laid_out.inputs)
        return self._scored(laid_out, found)

    def _without_compiler(self, model: nn.Module) -> nn.Module:
        """The module that `torch.compile` wraps: a stand-in for its forward cannot be traced; said once."""
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        said = "it runs uncompiled (torch_compile has no effect), because the scoring forward stands in for its own"
        if said not in self.fallbacks:
            self.fallbacks.append(said)
            logger.warning("%s: %s.", type(self.core).__name__, said)
        return inner

    def score_with_logits(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> tuple[Scored, Tensor]:
        """The same, and the model's own logits `(B, T, V)` of the padded rows: for those who ask for logits."""
        rows = padded_batch(batch, pad_token_id=self.pad_token_id)
        outputs = self.outputs(model, rows)
        return self.score_outputs(outputs, rows, options or ScoreOptions()), self.row_logits(outputs, rows)

    def outputs(self, model: nn.Module, rows: ModelBatch) -> Any:
        """The model's own outputs for padded rows, with all their logits."""
        with self._embedding_noise(rows):
            return model(**rows.inputs, **router_inputs(self.core), use_cache=False)

    def row_logits(self, outputs: Any, rows: ModelBatch) -> Tensor:
        """The logits `(B, T, V)` of the rows' own tokens; prompt tuning puts virtual tokens in front."""
        return outputs.logits[:, -rows.inputs["input_ids"].shape[1] :]

    def score_outputs(self, outputs: Any, rows: ModelBatch, options: ScoreOptions) -> Scored:
        """Score padded rows from the model's own outputs."""
        logits = self.row_logits(outputs, rows).flatten(0, 1)
        found = score_hidden(nn.Identity(), logits, rows, LogitRule(), options)
        found["aux_loss"] = getattr(outputs, "aux_loss", None)
        return self._scored(rows, found)

    def padded_inputs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """A batch of either layout as padded `input_ids`, `attention_mask` and `labels`, each `(B, T)`."""
        return padded_rows(batch, pad_token_id=self.pad_token_id)

    def lay_out(self, batch: Mapping[str, Any]) -> ModelBatch:
        """The batch in the layout that this model takes."""
        if self.flat:
            return flat_batch(batch, with_table=self._needs_table)
        return padded_batch(batch, pad_token_id=self.pad_token_id)

    def _forward(self, inputs: dict[str, Any], batch: ModelBatch, options: ScoreOptions) -> dict[str, Any]:
        """Stands in for the model's own forward: decoder, then the head over chunks of the scored positions."""
        inputs = {
            name: value for name, value in inputs.items() if value is not None and name != "return_dict"
        }
        router = router_inputs(self.core)
        with self._embedding_noise(batch):
            outputs = decoder_of(self.core)(**inputs, **router, use_cache=False)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        head = self.core.get_output_embeddings()
        assert head is not None
        found = call_head(head, hidden, batch, self.rule, options)
        if router:
            found["aux_loss"] = router_loss(self.core, outputs.router_logits, inputs.get("attention_mask"))
        return found

    def _scored(self, batch: ModelBatch, found: dict[str, Any]) -> Scored:
        entropy = None
        if found.get("entropy_total") is not None:
            count = torch.tensor(batch.real_tokens.numel(), device=found["entropy_total"].device)
            entropy = Weighted(found["entropy_total"], count)
        names = ("logps", "total", "entropies", "correct")
        values = {name: found.get(name) for name in names}
        return Scored(batch.scored, entropy=entropy, aux_loss=found.get("aux_loss"), **values)  # type: ignore[arg-type]

    @contextmanager
    def _embedding_noise(self, batch: ModelBatch) -> Iterator[None]:
        """NEFTune (arXiv:2310.05914, eq. 1): uniform noise of size alpha / sqrt(L d), L the sequence's own length."""
        if not self.neftune_alpha or not self.core.training:
            yield
            return
        alpha = self.neftune_alpha

        def add_noise(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
            lengths = batch.sequence_lengths.view(embedded.shape[:-1]).clamp(min=1)
            size = alpha / (lengths * embedded.shape[-1]).sqrt()
            size = torch.where(batch.sequence_lengths.view_as(lengths) > 0, size, 0.0).to(embedded.dtype)
            return embedded + torch.empty_like(embedded).uniform_(-1, 1) * size[..., None]

        handle = self.core.get_input_embeddings().register_forward_hook(add_noise)
        try:
            yield
        finally:
            handle.remove()
