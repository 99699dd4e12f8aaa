"""Rows of prompts -> rows with the token ids that a policy continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, List, Value

from trl.data.formats import is_list_of_dicts_with, maybe_convert_to_chatml
from trl.data.pipeline import RowKind, map_rows
from trl.data.rendering import ProcessingClass, render_prompt, text_tokenizer
from trl.data.tokenization import encode_open, read_chat, rows_of
from trl.data.validation import Place, check_text, check_tokenizer

PROMPT_IDS = "input_ids"
IMAGE_KEY = "image_key"  # of a prompt with images: where they are found again
_MASKS = ("attention_mask", "token_type_ids")


@dataclass(frozen=True)
class PromptPreparation:
    """How prompts are tokenised.

    `longest` is the most tokens that a prompt may have, `vocabulary` the number of token ids. A prompt keeps its last
    `keep` tokens. `template_kwargs` are for the chat template; those of a row win. `tools` are the schemas of what may
    be called, which only conversations can show.
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
    """The data set with a column `input_ids` of prompts; all other columns stay, except masks of the prompts' tokens.

    A row has a `prompt`, text or messages, or is tokenised already: `input_ids`, and optionally an `attention_mask`.

    Raises: ValueError or TypeError, naming the row, for prompts that are missing, empty, mixed, not tokens of the model, or
    longer than `settings.longest`.
    """
    kind = prompt_tokenizer(dataset, processing_class, settings, name=name)
    kept = [column for column in dataset.column_names if column not in _MASKS]
    rows = dataset.with_format(None)
    return map_rows(rows, kind, name=name, num_proc=settings.num_proc, keep_columns=kept)


def prompt_tokenizer(
    dataset: Dataset, processing_class: ProcessingClass, settings: PromptPreparation, *, name: str
) -> PromptTokenizer:
    """The tokenizer of rows like those of this data set.

    Raises: ValueError for a data set without prompts, or with prompts that do not fit its settings.
    """
    columns = dataset.column_names
    is_given = PROMPT_IDS in columns
    if not is_given and "prompt" not in columns:
        raise ValueError(
            f"{name} dataset has columns {columns}, expected 'prompt' (text or messages) or 'input_ids'. Rename the column "
            "that holds the prompts."
        )
    if not len(dataset):
        raise ValueError(f"{name} dataset has no rows, expected at least 1. Check its filters.")
    is_chat = _is_chat(dataset.with_format(None)[0])
    if settings.tools and (is_given or not is_chat):
        raise ValueError(
            f"{name} dataset has prompts without messages (columns {columns}), but tools are given, which only a chat template "
            'shows to the model. Write prompts as [{"role": "user", "content": ...}], or leave tools out.'
        )
    if settings.tools and "tools" in columns:
        raise ValueError(
            f"{name} dataset has a column 'tools', and the trainer has tools, expected one of them. Remove the column: only "
            "the trainer's tools are called."
        )
    if is_chat:
        place = Place(name, 0, "prompt")
        check_tokenizer(dataset, processing_class, place, is_chat=True, needs_eos=False)
    settings = replace(settings, num_proc=None)  # no part of the cache key
    return PromptTokenizer(processing_class, settings, name, is_given, is_chat)


def columns_for_rewards(column_names: Sequence[str]) -> list[str]:
    """The columns of a prepared set that reward functions get."""
    return [column for column in column_names if column not in (PROMPT_IDS, "prompt", IMAGE_KEY)]


def _is_chat(row: Mapping[str, Any]) -> bool:
    return is_list_of_dicts_with(maybe_convert_to_chatml(dict(row)).get("prompt"), "role")


@dataclass(frozen=True)
class PromptTokenizer(RowKind):
    """Rows of text, messages or tokens (`is_given`) as `input_ids`."""

    counts = ()

    processing_class: ProcessingClass
    settings: PromptPreparation
    dataset_name: str
    is_given: bool
    is_chat: bool

    @property
    def features(self) -> dict[str, Any]:
        return {PROMPT_IDS: List(Value("int32"))}

    def __call__(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
        rows, column = rows_of(batch), PROMPT_IDS if self.is_given else "prompt"
        places = [Place(self.dataset_name, index, column) for index in indices]
        if self.is_given:
            prompts = [_real_tokens(row) for row in rows]
        else:
            tokenizer = text_tokenizer(self.processing_class)
            texts = [self._text(row, place) for row, place in zip(rows, places, strict=True)]
            prompts = [ids for ids, _ in encode_open(tokenizer, texts, add_special_tokens=not self.is_chat)]
        keep = self.settings.keep
        prompts = prompts if keep is None else [prompt[-keep:] for prompt in prompts]
        for prompt, place in zip(prompts, places, strict=True):
            check_prompt_ids(prompt, self.settings, place)
        return {PROMPT_IDS: prompts}

    def _text(self, row: dict[str, Any], place: Place) -> str:
        if not self.is_chat:
            return check_text(row["prompt"], place)
        chat = read_chat(self.processing_class, row, place, tools=self.settings.tools)  # type: ignore[arg-type]
        kwargs = {**(self.settings.template_kwargs or {}), **chat.template_kwargs}
        with place.named():
            return render_prompt(self.processing_class, chat._replace(template_kwargs=kwargs))


def _real_tokens(row: Mapping[str, Any]) -> list[int]:
    ids, mask = row[PROMPT_IDS] or [], row.get("attention_mask")
    return list(ids) if mask is None else [token for token, real in zip(ids, mask, strict=True) if real]


def check_prompt_ids(prompt: list[int], settings: PromptPreparation, place: Place) -> None:
    """Raise ValueError for a prompt without tokens, with ids that the model does not have, or with too many."""
    longest, vocabulary = settings.longest, settings.vocabulary
    if not prompt:
        raise place.error("a prompt without tokens", "at least 1", "Begin it with the tokenizer's bos token.")
    if min(prompt) < 0 or (vocabulary is not None and max(prompt) >= vocabulary):
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        expected = f"0 to {(vocabulary or 0) - 1} (the model's vocabulary)"
        raise place.error(
            f"token id {wrong}", expected, "Tokenize with the tokenizer that belongs to the model."
        )
    if longest is not None and len(prompt) > longest:
        expected = f"at most {longest}: the completion needs room in the model's context, too"
        raise place.error(
            f"a prompt of {len(prompt)} tokens", expected, "Shorten or filter out such prompts."
        )
