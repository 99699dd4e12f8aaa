"""Logits and rewards of padded queries and responses, for users' own loops.

Padding is recognised by its token alone, so no text may contain that token, and it must differ from the end token. The
trainers here mask by position instead.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from trl.models.parts import causal_core
from trl.tensors.padding import first_true_indices


def forward(model: nn.Module, query_responses: Tensor, pad_token_id: int) -> ModelOutput:
    """The model's output, with hidden states, for rows `(B, T)` padded on either side.

    Positions count real tokens, and padding is not attended to. Outputs at padding are meaningless.
    """
    inputs = _taken_by(_core(model), padded_inputs(query_responses, pad_token_id))
    return model(**inputs, return_dict=True, output_hidden_states=True)


def get_reward(
    model: nn.Module, query_responses: Tensor, pad_token_id: int, context_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A sequence classifier's logits at each token and at each response's last token, and the position of the latter.

    `(B, T) -> (B, T, L), (B,), (B,)` for L labels (the second is `(B, L)` if L > 1). Rows are queries of `context_length`
    tokens, padded on the left, and responses, padded on the right; an empty response ends at the query's last token. Raises
    TypeError for a model without a layer `score` over its decoder.
    """
    classifier: Any = _core(model)
    decoder = getattr(classifier, classifier.base_model_prefix, None)
    if decoder is None or not hasattr(classifier, "score"):
        raise TypeError(
            f"model is a {type(classifier).__name__}, expected a sequence classifier with a layer `score` over its decoder. Load it "
            "with AutoModelForSequenceClassification."
        )
    inputs = _taken_by(decoder, padded_inputs(query_responses, pad_token_id))
    found = decoder(**inputs, return_dict=True, use_cache=False)
    logits = classifier.score(found.last_hidden_state)
    last = first_true_indices(query_responses[:, context_length:] == pad_token_id) - 1 + context_length
    rows = torch.arange(len(logits), device=logits.device)
    return logits, logits[rows, last].squeeze(-1), last


def padded_inputs(query_responses: Tensor, pad_token_id: int) -> dict[str, Tensor]:
    """The inputs for padded rows `(B, T)`: ids, mask, and positions that count real tokens.

    >>> padded_inputs(torch.tensor([[9, 5, 6, 9]]), pad_token_id=9)["position_ids"]
    tensor([[0, 0, 1, 2]])
    """
    mask = query_responses != pad_token_id
    ids = query_responses.masked_fill(~mask, 0)  # a pad token may be none of the model's
    counts = mask.long()
    return {"input_ids": ids, "attention_mask": counts, "position_ids": counts.cumsum(dim=1) - counts}


def _core(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside of DDP, DeepSpeed's engine (`prepare_deepspeed`), FSDP, a compiler and PEFT."""
    inner: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    return causal_core(inner)


def _taken_by(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the inputs that the model's forward knows: some take their positions from the mask."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in known}
