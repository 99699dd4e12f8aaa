"""Rows -> token ids and masks of what is trained, a batch of rows at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl.data.formats import common_prefix_length, maybe_convert_to_chatml, remove_none_values
from trl.data.multimodal import prepare_multimodal_messages
from trl.data.rendering import (
    Chat,
    ProcessingClass,
    TemplateRefusal,
    read_tools,
    render,
    split_rendering,
    template_source,
    text_tokenizer,
)
from trl.data.spans import AssistantTokens, StopTokens, assistant_tokens, encode
from trl.data.validation import Place, SFTRowType, accepted_roles, check_messages, check_text

# What is counted for each row beside its tokens; these columns are taken off again once they are summed.
COUNTED = ("shifted_boundaries", "unstopped_turns", "removed_begin_tokens")


class TokenRow(NamedTuple):
    """One tokenised row; a mask is None where the setting does not ask for it."""

    input_ids: list[int]
    completion_mask: list[int] | None = None
    assistant_masks: list[int] | None = None
    shifted_boundaries: int = 0
    unstopped_turns: int = 0
    removed_begin_tokens: int = 0


@dataclass(frozen=True)
class SFTTokenizer:
    """Tokenises batches of rows of one type for `datasets.Dataset.map` (batched, with indices).

    Text gets the tokenizer's special tokens and an eos token unless it ends with one; conversations get exactly what
    the chat template writes. `version` is part of the cache key of the prepared data set.
    """

    processing_class: ProcessingClass
    row_type: SFTRowType
    dataset_name: str
    completion_mask: bool = False
    assistant_masks: bool = False
    add_special_tokens: bool = True
    version: int = 2

    def __call__(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
        """Columns `input_ids`, the masks asked for, and those in `COUNTED`."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        tokenize = _METHODS[self.row_type.kind, self.row_type.is_conversational]
        tokenized = tokenize(self, rows, indices)
        columns = {name: [getattr(row, name) for row in tokenized] for name in TokenRow._fields}
        masks = {"completion_mask": self.completion_mask, "assistant_masks": self.assistant_masks}
        return {name: values for name, values in columns.items() if masks.get(name, True)}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return text_tokenizer(self.processing_class)

    def _place(self, row: int, column: str) -> Place:
        return Place(self.dataset_name, row, column)

    def _texts(
        self, rows: list[dict], indices: Sequence[int], column: str, *, may_be_empty: bool = False
    ) -> list[str]:
        texts = [
            check_text(row.get(column), self._place(index, column), may_be_empty=may_be_empty)
            for index, row in zip(indices, rows, strict=True)
        ]
        placeholder = getattr(self.processing_class, "image_token", None)
        for index, text in zip(indices, texts, strict=True):
            if placeholder and str(placeholder) in text and isinstance(self.processing_class, ProcessorMixin):
                raise ValueError(
                    f"{self._place(index, column)}: the text holds the placeholder {str(placeholder)!r}, but the rows have no "
                    "images. Give them in a column 'images' or 'image', or remove it."
                )
        return texts

    def text_rows(self, rows: list[dict], indices: Sequence[int]) -> list[TokenRow]:
        texts = self._texts(rows, indices, self.row_type.columns[0])
        return [
            TokenRow(closed, removed_begin_tokens=removed)
            for closed, removed in encode_closed(
                self.tokenizer, texts, add_special_tokens=self.add_special_tokens
            )
        ]

    def prompt_completion_rows(self, rows: list[dict], indices: Sequence[int]) -> list[TokenRow]:
        prompts = self._texts(rows, indices, "prompt", may_be_empty=True)
        completions = self._texts(rows, indices, "completion")
        joint = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        special = self.add_special_tokens
        whole = encode_closed(self.tokenizer, joint, add_special_tokens=special)
        heads = encode_open(self.tokenizer, prompts, add_special_tokens=special)
        return [
            _completion_row(head, ids)._replace(removed_begin_tokens=removed)
            for (head, _), (ids, removed) in zip(heads, whole, strict=True)
        ]

    def message_rows(self, rows: list[dict], indices: Sequence[int]) -> list[TokenRow]:
        column = self.row_type.columns[0]
        stop_tokens = StopTokens(self.tokenizer)
        chats = self._chats(rows, indices, (column,))
        if self.assistant_masks:
            return [
                _assistant_row(self._assistant_tokens(chat, stop_tokens, self._place(index, column)))
                for index, chat in zip(indices, chats, strict=True)
            ]
        texts = [
            self._rendered(render, self._place(index, column), self.processing_class, chat)
            for index, chat in zip(indices, chats, strict=True)
        ]
        unstopped = [int(stop_tokens.end_in(text) is None) for text in texts]
        return [
            TokenRow(ids, unstopped_turns=missing)
            for ids, missing in zip(encode(self.tokenizer, texts), unstopped, strict=True)
        ]

    def prompt_completion_chats(self, rows: list[dict], indices: Sequence[int]) -> list[TokenRow]:
        stop_tokens = StopTokens(self.tokenizer)
        prompts = self._chats(rows, indices, ("prompt",))
        answers = self._chats(rows, indices, ("completion",))
        halves = [
            self._rendered(
                split_rendering,
                self._place(index, "completion"),
                self.processing_class,
                prompt,
                answer.messages,
            )
            for index, prompt, answer in zip(indices, prompts, answers, strict=True)
        ]
        heads = encode(self.tokenizer, [prompt for prompt, _ in halves])
        if not self.assistant_masks:
            whole = encode(self.tokenizer, [prompt + completion for prompt, completion in halves])
            return [
                _completion_row(head, ids)._replace(
                    unstopped_turns=int(stop_tokens.end_in(completion) is None)
                )
                for head, ids, (_, completion) in zip(heads, whole, halves, strict=True)
            ]
        rows_out = []
        for index, head, prompt, answer in zip(indices, heads, prompts, answers, strict=True):
            chat = prompt._replace(messages=[*prompt.messages, *answer.messages])
            tokens = self._assistant_tokens(chat, stop_tokens, self._place(index, "completion"))
            split, row = _completion_row(head, tokens.input_ids), _assistant_row(tokens)
            shifted = split.shifted_boundaries + row.shifted_boundaries
            rows_out.append(row._replace(completion_mask=split.completion_mask, shifted_boundaries=shifted))
        return rows_out

    def _chats(self, rows: list[dict], indices: Sequence[int], columns: tuple[str, ...]) -> list[Chat]:
        roles = accepted_roles(template_source(self.processing_class))
        return [self._chat(row, index, columns[0], roles) for index, row in zip(indices, rows, strict=True)]

    def _chat(self, row: dict, index: int, column: str, roles: frozenset[str]) -> Chat:
        return read_chat(self.processing_class, row, self._place(index, column), roles=roles)

    def _assistant_tokens(self, chat: Chat, stop_tokens: StopTokens, place: Place) -> AssistantTokens:
        if not any(message["role"] == "assistant" for message in chat.messages):
            raise ValueError(
                f"{place}: no message of the assistant, expected one to train on with assistant_only_loss=True. Filter "
                "the row out, or set assistant_only_loss=False."
            )
        return self._rendered(assistant_tokens, place, self.processing_class, chat, stop_tokens)

    def _rendered(self, function: Any, place: Place, *arguments: Any) -> Any:
        """`function(*arguments)`, with the place added to what the chat template complains about."""
        try:
            return function(*arguments)
        except TemplateRefusal as error:
            raise ValueError(f"{place}: {error}") from error


def read_chat(
    processing_class: ProcessingClass,
    row: dict[str, Any],
    place: Place,
    *,
    roles: frozenset[str],
    tools: list[dict | Callable] | None = None,
) -> Chat:
    """The messages in the column at `place`, checked, with the row's template variables and tools.

    `tools` stand in for those of the row's own column.

    Raises: TypeError or ValueError naming the place where messages, tools or template variables are not readable.
    """
    converted = maybe_convert_to_chatml(row)
    messages = check_messages(converted.get(place.column), place, roles=roles)
    if isinstance(processing_class, ProcessorMixin):
        try:
            messages = prepare_multimodal_messages(messages, images=[])
        except (TypeError, ValueError) as error:
            raise type(error)(f"{place}: {error} Images stand in a column 'images' or 'image'.") from error
    try:
        tools = read_tools(row.get("tools") if tools is None else tools)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{place._replace(column='tools')}: {error}") from error
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise TypeError(
            f"{place._replace(column='chat_template_kwargs')}: a {type(kwargs).__name__}, expected a dict of template "
            "variables. Give one dict for each row."
        )
    return Chat(messages, tools, remove_none_values(kwargs))


_METHODS = {
    ("text", False): SFTTokenizer.text_rows,
    ("prompt_completion", False): SFTTokenizer.prompt_completion_rows,
    ("messages", True): SFTTokenizer.message_rows,
    ("prompt_completion", True): SFTTokenizer.prompt_completion_chats,
}


def encode_open(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool = True
) -> list[tuple[list[int], int]]:
    """Token ids of texts that something follows, and how many begin tokens were removed.

    The tokenizer's begin token is kept once where the text already starts with it; an end token that the tokenizer
    adds is taken off.
    """
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    opened = [single_begin(tokenizer, ids) for ids in encoded]  # type: ignore[union-attr]
    eos, eos_text = tokenizer.eos_token_id, str(tokenizer.eos_token)
    return [
        (ids[:-1] if ids and ids[-1] == eos and not text.endswith(eos_text) else ids, removed)
        for text, (ids, removed) in zip(texts, opened, strict=True)
    ]


def encode_closed(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool = True
) -> list[tuple[list[int], int]]:
    """Token ids of texts that end here, each with one eos token at its end, and how many begin tokens were removed."""
    eos = tokenizer.eos_token_id
    opened = encode_open(tokenizer, texts, add_special_tokens=add_special_tokens)
    return [(ids if ids and ids[-1] == eos else [*ids, eos], removed) for ids, removed in opened]  # type: ignore[list-item]


def single_begin(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[list[int], int]:
    """The ids with one begin token where text and tokenizer both brought one, and how many were removed."""
    begin = tokenizer.bos_token_id
    removed = 0
    while begin is not None and len(ids) - removed >= 2 and ids[removed] == ids[removed + 1] == begin:
        removed += 1
    return ids[removed:], removed


def _completion_row(head: list[int], ids: list[int]) -> TokenRow:
    """The completion begins at the first token that the prompt alone does not have, so none of its text is lost."""
    boundary = common_prefix_length(head, ids)
    mask = [0] * boundary + [1] * (len(ids) - boundary)
    return TokenRow(ids, completion_mask=mask, shifted_boundaries=int(boundary < len(head)))


def _assistant_row(tokens: AssistantTokens) -> TokenRow:
    return TokenRow(
        tokens.input_ids,
        assistant_masks=tokens.mask,
        shifted_boundaries=tokens.shifted,
        unstopped_turns=tokens.unstopped,
    )
