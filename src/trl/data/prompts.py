"""Rows of prompts -> rows with the token ids that a policy goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, List, Value

from trl.data.formats import is_list_of_dicts_with, maybe_convert_to_chatml
from trl.data.rendering import ProcessingClass, render_prompt, text_tokenizer
from trl.data.tokenization import encode_open, read_chat, rows_of
from trl.data.validation import Place, check_chat_template, check_text, warn_of_unread_tools

PROMPT_IDS = "input_ids"
IMAGE_KEY = "image_key"  # of a prompt with images: where they are found again
_MARKS = ("attention_mask", "token_type_ids")
_OF_PROMPTS = frozenset([PROMPT_IDS, "prompt", IMAGE_KEY])


@dataclass(frozen=True)
class PromptPreparation:
    """How prompts are tokenised.

    `longest` (tokens) is the longest prompt allowed, `vocabulary` the number of token ids. Of prompts of more than `keep`
    tokens the last ones are kept. `template_kwargs` are for the chat template; those of a row go before them. `tools` are the
    schemas of what may be called, which only conversations can show.
    """

    longest: int | None = None
    vocabulary: int | None = None
    num_proc: int | None = None
    keep: int | None = None
    template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


def prepare_prompts(
    dataset: Dataset, processing_class: ProcessingClass, settings: PromptPreparation, *, name: str
) -> Dataset:
    """The data set with a column `input_ids` of prompts ready to be gone on from; all other columns stay but those that run along with tokens.

    A row has a `prompt`, text or messages, or is tokenised already: `input_ids`, of which an `attention_mask` marks the
    real ones.

    Raises: ValueError or TypeError, naming the row, for prompts that are missing, empty, mixed, not tokens of the model, or
    longer than `settings.longest`.
    """
    tokenize = prompt_reader(dataset, processing_class, settings, name=name)
    used = [name for name in _MARKS if name in dataset.column_names]
    kept = {name: kind for name, kind in dataset.features.items() if name not in used}
    return dataset.with_format(None).map(
        tokenize,
        batched=True,
        with_indices=True,
        remove_columns=used,
        features=Features({**kept, PROMPT_IDS: List(Value("int32"))}),
        num_proc=settings.num_proc,
        desc=f"Tokenizing {name} prompts",
    )


def prompt_reader(
    dataset: Dataset, processing_class: ProcessingClass, settings: PromptPreparation, *, name: str
) -> Callable[[dict[str, list], list[int]], dict[str, list]]:
    """What makes a column `input_ids` of a batch of rows like these and their numbers.

    Raises: ValueError for a data set without prompts, or with prompts that its settings do not go with; the reader, as
    `prepare_prompts` does, for a row's own.
    """
    tokenized = PROMPT_IDS in dataset.column_names
    if not tokenized and "prompt" not in dataset.column_names:
        raise ValueError(
            f"{name} dataset has columns {dataset.column_names}, expected 'prompt' (text or messages) or 'input_ids'. Rename "
            "the column that holds the prompts."
        )
    if not len(dataset):
        raise ValueError(f"{name} dataset has no rows, expected at least 1. Check how it was filtered.")
    tokenize = _Prompts(processing_class, settings, name, tokenized, _is_chat(dataset))
    if settings.tools:
        _check_tools(dataset, name, carried=tokenize.chat and not tokenized)
    if tokenize.chat:
        check_chat_template(processing_class, Place(name, 0, "prompt"))
        warn_of_unread_tools(dataset, processing_class, name=name)
    return tokenize


def _check_tools(dataset: Dataset, name: str, *, carried: bool) -> None:
    """Raise ValueError for prompts that do not show tools, or show others than may be called."""
    if not carried:
        raise ValueError(
            f"{name} dataset has prompts without messages (columns {dataset.column_names}), expected conversations: the chat template "
            'tells the model of its tools. Write prompts as [{"role": "user", "content": ...}], or leave tools out.'
        )
    if "tools" in dataset.column_names:
        raise ValueError(
            f"{name} dataset has a column 'tools' beside the trainer's own tools, expected one of them. Remove the column: calls "
            "are answered by the trainer's tools alone."
        )


def columns_for_rewards(column_names: Sequence[str]) -> list[str]:
    """Those columns of a prepared set that reward functions are handed."""
    return [column for column in column_names if column not in _OF_PROMPTS]


def _is_chat(dataset: Dataset) -> bool:
    first = maybe_convert_to_chatml(dict(dataset.with_format(None)[0]))
    return is_list_of_dicts_with(first.get("prompt"), "role")


@dataclass(frozen=True)
class _Prompts:
    """Tokenises batches of rows."""

    processing_class: ProcessingClass
    settings: PromptPreparation
    name: str
    tokenized: bool
    chat: bool

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        rows = rows_of(batch)
        ids = self._given(rows) if self.tokenized else self._encoded(rows, indices)
        if self.settings.keep is not None:
            ids = [prompt[-self.settings.keep :] for prompt in ids]
        for index, prompt in zip(indices, ids, strict=True):
            place = Place(self.name, index, PROMPT_IDS if self.tokenized else "prompt")
            check_prompt_ids(prompt, self.settings, place)
        return {PROMPT_IDS: ids}

    def _given(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        return [
            [token for token, real in zip(row[PROMPT_IDS], row["attention_mask"], strict=True) if real]
            if row.get("attention_mask") is not None
            else list(row[PROMPT_IDS] or [])
            for row in rows
        ]

    def _encoded(self, rows: list[dict[str, Any]], indices: list[int]) -> list[list[int]]:
        texts = [
            self._text(row, Place(self.name, index, "prompt"))
            for row, index in zip(rows, indices, strict=True)
        ]
        tokenizer = text_tokenizer(self.processing_class)
        return [ids for ids, _ in encode_open(tokenizer, texts, add_special_tokens=not self.chat)]

    def _text(self, row: dict[str, Any], place: Place) -> str:
        if not self.chat:
            return check_text(row["prompt"], place)
        chat = read_chat(self.processing_class, row, place, tools=self.settings.tools)  # type: ignore[arg-type]
        kwargs = {**(self.settings.template_kwargs or {}), **chat.template_kwargs}
        with place.named():
            return render_prompt(self.processing_class, chat._replace(template_kwargs=kwargs))


def check_prompt_ids(prompt: list[int], settings: PromptPreparation, place: Place) -> None:
    """Raise ValueError for a prompt without tokens, with ids that are none of the model's, or of too many."""
    longest, vocabulary = settings.longest, settings.vocabulary
    if not prompt:
        raise place.error("a prompt without tokens", "at least 1", "Begin it with the tokenizer's bos token.")
    for token in prompt:
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            expected = f"0 to {(vocabulary or 0) - 1} (the model's vocabulary)"
            raise place.error(
                f"token id {token}", expected, "Tokenize with the tokenizer that belongs to the model."
            )
    if longest is not None and len(prompt) > longest:
        expected = f"at most {longest}: the response needs room in the model's context, too"
        raise place.error(
            f"a prompt of {len(prompt)} tokens", expected, "Shorten or filter out such prompts."
        )
