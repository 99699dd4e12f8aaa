"""The scoring forward of encoder-decoders: log-probabilities of completions, without the logits.

`Seq2SeqScorer` runs the encoder once per prompt, repeats its states for the prompt's completions, runs the decoder and
then the scoring primitive on the labelled positions, inside the model's own `forward` and the head's own `__call__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.models.packed.layout import IGNORED, ModelBatch, labelled_positions
from trl.models.parts import causal_core, logits_obstacle, prompt_learning_obstacle, replaced_forward
from trl.models.scoring.base import ScorerBase, given_inputs
from trl.models.scoring.causal import Scored, scored_of
from trl.models.scoring.head import ScoreOptions, call_head, score_hidden
from trl.tensors.softmax_rows import LogitRule

_KEYS = ("input_ids", "attention_mask", "decoder_labels", "decoder_prompt")


class Seq2SeqScorer(ScorerBase):
    """How one encoder-decoder is scored, decided once, as `Scorer` decides for decoders.

    A batch holds `input_ids`, `attention_mask` `(B, P)`: the prompts; `decoder_labels` `(S, T)`: the completions, -100
    where a position is padding or not trained; `decoder_prompt` `(S,)`: the prompt of each. A model whose logits are not
    what its decoder and head give is scored from its own logits; `fallbacks` says so.

    Example:
        >>> scorer = Seq2SeqScorer(model, pad_token_id=tokenizer.pad_token_id)  # doctest: +SKIP
        >>> scorer.score(model, batch).logps  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0) -> None:
        core = causal_core(model)
        _check_encoder_decoder(core)
        self.rule = _seq2seq_rule(core.config)
        obstacle = prompt_learning_obstacle(model) or _head_obstacle(core, self.rule)
        super().__init__(core, obstacle=obstacle, pad_token_id=pad_token_id, flat=False)

    def score(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> Scored:
        """Score the labels of all completions; `positions.sequence` is the completion's index in `decoder_labels`."""
        self._check(batch)
        options = options or ScoreOptions()
        prompt, laid_out = batch["decoder_prompt"], self._lay_out(batch)
        if not self.uses_head:
            return self._score_own_logits(self.uncompiled(model), prompt, laid_out, options)

        def forward(**inputs: Any) -> dict[str, Any]:
            return self._forward(given_inputs(inputs), prompt, laid_out, options)

        with replaced_forward(self.core, forward):
            return scored_of(laid_out, self.uncompiled(model)(**laid_out.inputs))

    def _forward(
        self, inputs: dict[str, Any], prompt: Tensor, batch: ModelBatch, options: ScoreOptions
    ) -> dict[str, Any]:
        """Stands in for the model's own forward: encoder, decoder, then the head over chunks of labelled positions."""
        core: Any = self.core
        mask, decoder_input_ids = inputs["attention_mask"], inputs.pop("decoder_input_ids")
        encoded = core.get_encoder()(**inputs).last_hidden_state
        decoded = core.get_decoder()(
            input_ids=decoder_input_ids,
            encoder_hidden_states=encoded[prompt],
            encoder_attention_mask=mask[prompt],
            use_cache=False,
        )
        return self.through_head(decoded.last_hidden_state.flatten(0, 1), batch, options)

    def through_head(self, hidden: Tensor, batch: ModelBatch, options: ScoreOptions) -> dict[str, Any]:
        """What is found of the decoder's hidden states `(tokens, H)`; called inside the model's own forward."""
        head = self.core.get_output_embeddings()
        assert head is not None
        return call_head(head, hidden, batch, self.rule, options, bias=_logits_bias(self.core))

    def score_with_logits(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> tuple[Scored, Tensor]:
        """The same, and the model's own logits `(S, T, V)` of the completions: for those who ask for logits."""
        self._check(batch)
        laid_out = self._lay_out(batch)
        outputs = self._outputs(model, batch["decoder_prompt"], laid_out)
        return self.score_outputs(outputs, laid_out, options or ScoreOptions()), _row_logits(
            outputs, laid_out
        )

    def _score_own_logits(
        self, model: nn.Module, prompt: Tensor, batch: ModelBatch, options: ScoreOptions
    ) -> Scored:
        return self.score_outputs(self._outputs(model, prompt, batch), batch, options)

    def _outputs(self, model: nn.Module, prompt: Tensor, batch: ModelBatch) -> Any:
        ids, mask = (batch.inputs[name][prompt] for name in ("input_ids", "attention_mask"))
        decoder_ids = batch.inputs["decoder_input_ids"]
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids, use_cache=False)

    def score_outputs(self, outputs: Any, rows: ModelBatch, options: ScoreOptions) -> Scored:
        """Score completions from the model's own outputs."""
        logits = _row_logits(outputs, rows).flatten(0, 1)
        return scored_of(rows, score_hidden(nn.Identity(), logits, rows, LogitRule(), options))

    def _lay_out(self, batch: Mapping[str, Any]) -> ModelBatch:
        labels = batch["decoder_labels"]
        rows, width = labels.shape
        sequence = torch.arange(rows, device=labels.device)[:, None].expand(rows, width)
        scored, real = labelled_positions(labels, sequence), labels.ne(IGNORED)
        lengths = real.sum(dim=1)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        inputs["decoder_input_ids"] = _shifted_right(self.core, labels, pad_token_id=self.pad_token_id)
        return ModelBatch(
            inputs=inputs,
            scored=scored,
            real_tokens=scored.source,
            sequence_lengths=(lengths[:, None] * real).flatten(),
            sequence_ends=sequence[:, 0] * width + lengths - 1,
        )

    def _check(self, batch: Mapping[str, Any]) -> None:
        missing = [name for name in _KEYS if batch.get(name) is None]
        if missing:
            raise ValueError(
                f"a batch for an encoder-decoder must have {', '.join(_KEYS)}, got none of {', '.join(missing)}. "
                "Make it with trl.collators.seq2seq.seq2seq_batch."
            )
        if self.neftune_alpha:
            raise ValueError(
                f"neftune_noise_alpha must be None for the encoder-decoder {type(self.core).__name__}, got "
                f"{self.neftune_alpha}. Its noise is defined for decoders alone."
            )


def _row_logits(outputs: Any, rows: ModelBatch) -> Tensor:
    """The logits `(S, T, V)` of the completions' own tokens; prompt tuning puts virtual tokens in front."""
    return outputs.logits[:, -rows.inputs["decoder_input_ids"].shape[1] :]


def _check_encoder_decoder(core: PreTrainedModel) -> None:
    if not getattr(core.config, "is_encoder_decoder", False) or not core.can_generate():
        raise TypeError(
            f"model is a {type(core).__name__}, expected an encoder-decoder that generates. Load one with "
            "AutoModelForSeq2SeqLM."
        )
    if getattr(core.config, "decoder_start_token_id", None) is None:
        raise ValueError(
            f"the config of {type(core).__name__} must have a decoder_start_token_id, got None. Set it to the token that "
            "every completion begins with (T5: the pad token)."
        )


def _seq2seq_rule(config: Any) -> LogitRule:
    """What the model does to its head's products: T5 scales its decoder's outputs where the embeddings are the head."""
    scaled = getattr(config, "scale_decoder_outputs", False)
    return LogitRule(scale=config.d_model**-0.5 if scaled else 1.0)


def _head_obstacle(core: Any, rule: LogitRule) -> str | None:
    head, encoder, decoder = core.get_output_embeddings(), core.get_encoder(), core.get_decoder()
    if head is None or encoder in (None, core) or decoder in (None, core):
        return "it exposes no encoder, decoder and output head"
    ids = torch.zeros(1, 3, dtype=torch.int64, device=core.device)
    bias = _logits_bias(core)
    return logits_obstacle(core, [encoder, decoder], head, rule, bias=bias, decoder_input_ids=ids)


def _logits_bias(core: Any) -> Tensor | None:
    """The bias `(V,)` that BART and its kin add to their head's products."""
    bias = getattr(core, "final_logits_bias", None)
    return None if bias is None else bias[0]


def _shifted_right(core: Any, labels: Tensor, *, pad_token_id: int) -> Tensor:
    """The decoder's inputs `(S, T)`: the labels behind the start token, by the model's own rule where it has one."""
    own = getattr(core, "prepare_decoder_input_ids_from_labels", None)
    if own is not None and core.config.pad_token_id is not None:
        return own(labels)
    shifted = shift_tokens_right(labels, core.config.decoder_start_token_id)
    return shifted.masked_fill(shifted == IGNORED, pad_token_id)


def shift_tokens_right(input_ids: Tensor, decoder_start_token_id: int) -> Tensor:
    """The rows moved by one position, behind the start token; the last token of each is dropped. `(B, T) -> (B, T)`."""
    start = input_ids.new_full((len(input_ids), 1), decoder_start_token_id)
    return torch.cat([start, input_ids[:, :-1]], dim=1)
