"""The scoring forward of encoder-decoders: the encoder runs once per prompt."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.models.packed.layout import IGNORED, Columns, Inputs, ModelBatch, labelled_positions
from trl.models.parts import logits_unsupported
from trl.models.scoring.causal import Scorer
from trl.tensors.softmax_rows import LogitRule


class Seq2SeqScorer(Scorer):
    """`Scorer` of an encoder-decoder; rows are always padded.

    A batch holds `input_ids`, `attention_mask` `(B, P)`: the prompts; `decoder_labels` `(S, T)`: the completions, -100
    where a position is padding or not trained; `decoder_prompt` `(S,)`: the prompt of each. `positions.sequence` of a
    result is the completion's index in `decoder_labels`.
    """

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0) -> None:
        super().__init__(model, pad_token_id=pad_token_id, packed=False)

    def _set_up_head(self, core: PreTrainedModel) -> str | None:
        if not getattr(core.config, "is_encoder_decoder", False) or not core.can_generate():
            raise TypeError(f"model must be an encoder-decoder, got {type(core).__name__}.")
        if getattr(core.config, "decoder_start_token_id", None) is None:
            raise ValueError("decoder_start_token_id must be in the model's config, got None.")
        scaled = getattr(core.config, "scale_decoder_outputs", False)  # T5, where the embeddings are the head
        self.core, self.rule = core, LogitRule(scale=core.config.d_model**-0.5 if scaled else 1.0)
        head, encoder, decoder = core.get_output_embeddings(), core.get_encoder(), core.get_decoder()
        if head is None or encoder in (None, core) or decoder in (None, core):
            return "it exposes no encoder, decoder and output head"
        ids = torch.zeros(1, 3, dtype=torch.int64, device=core.device)
        return logits_unsupported(core, [encoder, decoder], head, self.rule, bias=self.bias, decoder_input_ids=ids)

    @property
    def bias(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bias `(V,)` that BART-like models add to their head's products."""
        bias = getattr(self.core, "final_logits_bias", None)
        return None if bias is None else bias[0]

    def hidden_states(self, inputs: Inputs, rows: ModelBatch) -> tuple[Tensor, Tensor | None]:
        """The decoder's last hidden states `(S, T, H)`."""
        core = self.core
        mask, decoder_input_ids = inputs["attention_mask"], inputs.pop("decoder_input_ids")
        encoded = core.get_encoder()(**inputs).last_hidden_state
        decoded = core.get_decoder()(
            input_ids=decoder_input_ids, encoder_hidden_states=encoded[rows.prompts],
            encoder_attention_mask=mask[rows.prompts], use_cache=False,
        )  # fmt: skip
        return decoded.last_hidden_state, None

    def own_inputs(self, rows: ModelBatch) -> Inputs:
        """The arguments of the model's own forward, each completion with its prompt."""
        prompts = {name: rows.inputs[name][rows.prompts] for name in ("input_ids", "attention_mask")}
        return {**rows.inputs, **prompts}

    def lay_out(self, batch: Columns, *, shifted: bool = True) -> ModelBatch:
        """The batch as inputs of the model; labels are never shifted, the decoder's inputs are.

        Raises: ValueError for noise on the embeddings.
        """
        if self.neftune_alpha:
            raise ValueError("neftune_noise_alpha must be None for encoder-decoders.")
        labels = batch["decoder_labels"]
        rows, width = labels.shape
        sequence = torch.arange(rows, device=labels.device)[:, None].expand(rows, width)
        scored, real = labelled_positions(labels, sequence), labels.ne(IGNORED)
        lengths = real.sum(dim=1)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        inputs["decoder_input_ids"] = _shifted_right(self.core, labels, pad_token_id=self.pad_token_id)
        return ModelBatch(
            inputs=inputs, scored=scored, real_tokens=scored.source,
            sequence_lengths=(lengths[:, None] * real).flatten(),
            sequence_ends=sequence[:, 0] * width + lengths - 1, prompts=batch["decoder_prompt"],
        )  # fmt: skip


def language_scorer(model: nn.Module, *, pad_token_id: int = 0, packed: bool | None = None) -> Scorer:
    """The scorer of a decoder or an encoder-decoder, with or without a value head."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return Seq2SeqScorer(model, pad_token_id=pad_token_id)
    return Scorer(model, pad_token_id=pad_token_id, packed=packed)


def _shifted_right(core: PreTrainedModel, labels: Tensor, *, pad_token_id: int) -> Tensor:
    """The decoder's inputs `(S, T)`: the labels after the start token, by the model's own function if it has one."""
    shift = getattr(core, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None and core.config.pad_token_id is not None:
        return shift(labels)
    shifted = shift_tokens_right(labels, core.config.decoder_start_token_id)
    return shifted.masked_fill(shifted == IGNORED, pad_token_id)


def shift_tokens_right(input_ids: Tensor, decoder_start_token_id: int) -> Tensor:
    """The rows shifted right by one position, after the start token. `(B, T) -> (B, T)`."""
    start = input_ids.new_full((len(input_ids), 1), decoder_start_token_id)
    return torch.cat([start, input_ids[:, :-1]], dim=1)
