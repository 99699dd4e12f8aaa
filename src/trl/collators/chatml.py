"""Conversations as batches in which the last assistant message is trained, with the prompts beside them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.collators.rows import IGNORED, Row, as_ids, pad_with_mask
from trl.data.formats import common_prefix_length
from trl.data.rendering import Chat, split_rendering
from trl.data.tokenization import encode
from trl.data.validation import Place
from trl.tensors.padding import pad

_DEFAULT_MAX_LENGTH = 1024


@dataclass
class DataCollatorForChatML:
    """Renders conversations, trains on the last message, and gives the prompts by themselves too.

    Each row has a conversation under `messages_key` that ends with an assistant's message. A row may bring its tokens
    as `input_ids`, its rendered prompt as text under `prompt_key`, or both.

    All of the batch is padded on the left: `input_ids`, `attention_mask`, `labels` `(B, T)`; `prompts`,
    `prompt_attention_mask` `(B, P)`. The prompt is the beginning of the row's own tokens, up to where its rendering
    ready for generation ends. Rows longer than `max_length` lose their end; those that lose all that is trained are
    warned of and counted in `rows_without_completion`.

    Args:
        tokenizer: Tokenizer with a chat template and a pad token.
        ignore_index: Label of what is not trained.
        max_length: Longest row, in tokens; by default the tokenizer's own limit, 1024 at most.
        prompt_key: Column with the rendered prompt, where there is one.
        messages_key: Column with the conversation.
    """

    tokenizer: PreTrainedTokenizerBase
    ignore_index: int = IGNORED
    max_length: int = None  # type: ignore[assignment]
    prompt_key: str = "prompt"
    messages_key: str = "messages"

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no pad token, batches need one. Set tokenizer.pad_token.")
        if self.max_length is None:
            self.max_length = min(self.tokenizer.model_max_length, _DEFAULT_MAX_LENGTH)
        if self.max_length < 1:
            raise ValueError(f"max_length must be >= 1, got {self.max_length}.")
        self.rows_without_completion = 0

    def __call__(self, examples: Sequence[Row]) -> dict[str, Tensor]:
        rows = [self._encode(index, row) for index, row in enumerate(examples)]
        if lost := sum(boundary >= self.max_length for _, boundary in rows):
            self.rows_without_completion += lost
            warnings.warn(
                f"{lost} of {len(rows)} rows have prompts of max_length tokens or more: not trained.", stacklevel=2
            )
        pad_id: int = self.tokenizer.pad_token_id  # type: ignore[assignment]
        ids = [ids[: self.max_length] for ids, _ in rows]
        prompts = [row[:boundary] for row, (_, boundary) in zip(ids, rows, strict=True)]
        labels = [row.clone() for row in ids]
        for row_labels, (_, boundary) in zip(labels, rows, strict=True):
            row_labels[:boundary] = self.ignore_index
        padded, mask = pad_with_mask(ids, pad_id, side="left")
        labelled = pad(labels, self.ignore_index, "left")
        batch = {"input_ids": padded, "attention_mask": mask, "labels": labelled}
        batch["prompts"], batch["prompt_attention_mask"] = pad_with_mask(prompts, pad_id, side="left")
        return batch

    def _encode(self, index: int, row: Row) -> tuple[Tensor, int]:
        """Token ids `(T,)` of a row, and how many of them are its prompt."""
        ids, prompt = row.get("input_ids"), row.get(self.prompt_key)
        if ids is None or not isinstance(prompt, str):
            rendered, completion = self._render(index, row)
            prompt = prompt if isinstance(prompt, str) else rendered
            ids = encode(self.tokenizer, [rendered + completion])[0] if ids is None else ids
        whole = as_ids(ids)
        boundary = common_prefix_length(encode(self.tokenizer, [prompt])[0], whole.tolist())
        if prompt and not boundary:
            raise ValueError(
                f"row {index} of the batch: the tokens do not begin with {self.prompt_key!r}, {prompt[:60]!r}. Leave "
                "it out."
            )
        return whole, boundary

    def _render(self, index: int, row: Row) -> tuple[str, str]:
        messages = row.get(self.messages_key)
        if not isinstance(messages, list) or len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise ValueError(
                f"row {index} of the batch: {self.messages_key!r} is {str(messages)[:80]!r}, expected 2 messages or "
                "more that end with an assistant's. Add the answer, or name the column with messages_key."
            )
        with Place("", index, self.messages_key).named():
            return split_rendering(self.tokenizer, Chat(messages[:-1]), messages[-1:])
