"""For custom training loops over padded queries: a model's own `generate`, logits, rewards, stop strings, lengths.

Padding is recognised by its token alone: no text may contain that token, and it must differ from the end token.
Trainers use engines and scorers, which mask by position.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils.generic import ModelOutput

from trl.models.parts import causal_core
from trl.tensors.padding import first_true_indices, pad


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

    `(B, T) -> (B, T, L), (B,), (B,)` for L labels (the second is `(B, L)` if L > 1). Rows are queries of
    `context_length` tokens, padded on the left, and responses, padded on the right; an empty response ends at the
    query's last token. Raises TypeError for a model without a layer `score` over its decoder.
    """
    classifier: Any = _core(model)
    decoder = getattr(classifier, classifier.base_model_prefix, None)
    if decoder is None or not hasattr(classifier, "score"):
        raise TypeError(f"model must be a classifier with a layer `score`, got {type(classifier).__name__}.")
    inputs = _taken_by(decoder, padded_inputs(query_responses, pad_token_id))
    outputs = decoder(**inputs, return_dict=True, use_cache=False)
    logits = classifier.score(outputs.last_hidden_state)
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
    return causal_core(extract_model_from_parallel(model, keep_torch_compile=False))  # type: ignore[arg-type]


def _taken_by(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the inputs that the model's forward knows: some take their positions from the mask."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in known}


def generate(
    lm_backbone: nn.Module, queries: Tensor, pad_token_id: int, generation_config: GenerationConfig
) -> tuple[Tensor, Tensor]:
    """Left-padded queries `(B, P)` followed by their responses, and the logits of the response tokens.

    `-> (B, P + T), (B, T, V)`. Logits are those after temperature and truncation. Responses are padded with the pad
    token of `generation_config`, or else with `pad_token_id`.
    """
    model: Any = lm_backbone
    inputs = padded_inputs(queries, pad_token_id)
    padding = {} if generation_config.pad_token_id is not None else {"pad_token_id": pad_token_id}
    outputs = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=generation_config,
        return_dict_in_generate=True, output_scores=True, **padding,
    )  # fmt: skip
    responses = outputs.sequences[:, queries.shape[1] :]
    return torch.cat([queries, responses], dim=1), torch.stack(outputs.scores, dim=1)


@torch.no_grad()
def batch_generation(
    model: nn.Module, queries: Tensor, local_rollout_forward_batch_size: int, pad_token_id: int,
    generation_config: GenerationConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`generate` for a few rows at a time; results are padded on the right to the longest response, logits with 0."""
    batches = [
        generate(model, rows, pad_token_id, generation_config)
        for rows in queries.split(local_rollout_forward_batch_size)
    ]
    sequences, logits = ([row for part in parts for row in part] for parts in zip(*batches, strict=True))
    return pad(sequences, padding_value=pad_token_id), pad(logits, padding_value=0)


@torch.no_grad()
def respond_to_batch(
    model: nn.Module, queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Sample exactly `txt_len` tokens after each query, `(B, P) -> (B, txt_len)`, also after end tokens.

    Queries have one length, without padding. `model` may have a value head. Uses torch's global generator.
    """
    sequences = queries
    for _ in range(txt_len):
        logits = model(sequences)[0][:, -1, :]
        probabilities = top_k_top_p_filtering(logits, top_k=top_k, top_p=top_p).softmax(dim=-1)
        sequences = torch.cat([sequences, torch.multinomial(probabilities, num_samples=1)], dim=-1)
    return sequences[:, queries.shape[1] :]


def top_k_top_p_filtering(
    logits: Tensor, top_k: int = 0, top_p: float = 1.0, filter_value: float = -float("inf"), min_tokens_to_keep: int = 1
) -> Tensor:
    """Logits `(B, V)` with `filter_value` outside the `top_k` largest (0: all) and the nucleus of `top_p` (1: all).

    >>> top_k_top_p_filtering(torch.tensor([[1.0, 3.0, 2.0]]), top_k=2)
    tensor([[-inf, 3., 2.]])
    """
    cuts = LogitsProcessorList()
    if top_k > 0:
        cuts.append(TopKLogitsWarper(top_k, filter_value, min_tokens_to_keep))
    if 0 <= top_p < 1:
        cuts.append(TopPLogitsWarper(top_p, filter_value, min_tokens_to_keep))
    return cuts(torch.empty(0, dtype=torch.int64), logits)  # pyright: ignore[reportArgumentType]


def decode_and_strip_padding(inputs: Tensor, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of padded rows, with special tokens but the pad token."""
    texts = tokenizer.batch_decode(inputs, skip_special_tokens=False)
    return [text.replace(str(tokenizer.pad_token), "") for text in texts]


class StringStoppingCriteria(StoppingCriteria):
    """Stops a row of `generate` once its generated text contains one of `stop_strings`; prompts are not searched.

    It can be reused for several calls: it resets when all rows have stopped, or when `first_call` is set to True.
    """

    def __init__(self, stop_strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.stop_strings, self.tokenizer = stop_strings, tokenizer
        self.first_call = True
        self._prompt_length = 0

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Bool `(B,)`: rows that are done."""
        if self.first_call:
            self._prompt_length, self.first_call = input_ids.shape[-1] - 1, False
        texts = self.tokenizer.batch_decode(input_ids[:, self._prompt_length :])
        done = [any(stop in text for stop in self.stop_strings) for text in texts]
        self.first_call = all(done)
        return torch.tensor(done, device=input_ids.device)


class LengthSampler:
    """Draws a number of new tokens from `min_value, ..., max_value - 1` with numpy's generator.

    Raises: ValueError for an empty range.

    >>> LengthSampler(4, 5)()
    4
    """

    def __init__(self, min_value: int, max_value: int) -> None:
        if not 0 < min_value < max_value:
            raise ValueError(f"min_value must be from 1 to max_value - 1, got {min_value} and {max_value}.")
        self.min_value, self.max_value = min_value, max_value

    def __call__(self) -> int:
        """One length, in tokens."""
        return int(np.random.randint(self.min_value, self.max_value))
