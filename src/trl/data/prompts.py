"""Rows of prompts -> rows with the token ids that a policy continues."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset, List, Value
from datasets.features.features import FeatureType

from trl.data.formats import Row, RowDict, has_images, is_list_of_dicts_with, maybe_convert_to_chatml
from trl.data.pipeline import STREAM_BATCH, RowKind, Vocabulary, check_ids, first_row, json_columns
from trl.data.rendering import ProcessingClass, render_prompt, text_tokenizer
from trl.data.streaming import RowStream
from trl.data.tokenization import encode_open, read_chat
from trl.data.validation import Place, check_text, check_tokenizer, wrong_columns

logger = logging.getLogger(__name__)

SHUFFLED_ROWS = 1000  # rows of a stream among which the next one is drawn
PROMPT_IDS = "input_ids"
IMAGE_KEY = "image_key"  # of a prompt with images: where they are found again
_MASKS = ("attention_mask", "token_type_ids")


@dataclass(frozen=True)
class PromptPreparation:
    """How prompts are tokenised.

    `longest` is the most tokens that a prompt may have, `vocabulary` the number of token ids. A prompt keeps its last
    `keep` tokens. The `template_kwargs` of a row win. `tools` are schemas, which only conversations can show.
    """

    longest: int | None = None
    vocabulary: int | None = None
    num_proc: int | None = None
    keep: int | None = None
    template_kwargs: Row | None = None
    tools: Sequence[Row] | None = None


def prompt_tokenizer(
    dataset: Dataset, processing_class: ProcessingClass, settings: PromptPreparation, *, name: str
) -> "PromptTokenizer":
    """The tokenizer of a data set's rows. Raises: ValueError for prompts that do not fit the settings."""
    columns, is_given = dataset.column_names, PROMPT_IDS in dataset.column_names
    first = first_row(dataset, name, "a prompt")
    if not is_given and "prompt" not in columns:
        raise wrong_columns(columns, name, takes="'prompt' or 'input_ids'", needed=["prompt"])
    row = maybe_convert_to_chatml(dict(first))
    is_chat = is_list_of_dicts_with(row.get("prompt"), "role")
    if settings.tools and (is_given or not is_chat):
        raise ValueError(
            f'{name} dataset: tools need prompts of messages, [{{"role": "user", "content": ...}}]. '
            "Write them so, or leave tools out."
        )
    if settings.tools and "tools" in columns:
        raise ValueError(f"{name} dataset has a column 'tools', beside the trainer's own. Remove the column.")
    if is_chat:
        check_tokenizer(dataset, processing_class, Place(name, 0, "prompt"), is_chat=True, needs_eos=False)
    settings = replace(settings, num_proc=None)  # no part of the cache key
    return PromptTokenizer(processing_class, settings, name, is_given, is_chat)


@dataclass(frozen=True)
class PromptTokenizer(RowKind):
    """Rows of text, messages or tokens (`is_given`) as `input_ids`."""

    counts = ()

    processing_class: ProcessingClass
    settings: PromptPreparation
    dataset_name: str
    is_given: bool
    is_chat: bool
    version: int = 1  # part of the cache key

    @property
    def features(self) -> dict[str, FeatureType]:
        return {PROMPT_IDS: List(Value("int32"))}

    def rows(self, rows: Sequence[Row], indices: Sequence[int]) -> list[RowDict]:
        column = PROMPT_IDS if self.is_given else "prompt"
        places = [Place(self.dataset_name, index, column) for index in indices]
        if self.is_given:
            prompts = [list(row[PROMPT_IDS] or []) for row in rows]
        else:
            texts = [self._text(row, place) for row, place in zip(rows, places, strict=True)]
            tokenizer = text_tokenizer(self.processing_class)
            prompts = [ids for ids, _ in encode_open(tokenizer, texts, add_special_tokens=not self.is_chat)]
        prompts = [prompt[-(self.settings.keep or 0) :] for prompt in prompts]
        for prompt, place in zip(prompts, places, strict=True):
            check_prompt_ids(prompt, self.settings, place)
        return [{PROMPT_IDS: prompt} for prompt in prompts]

    def _text(self, row: Row, place: Place) -> str:
        if not self.is_chat:
            return check_text(row["prompt"], place)
        chat = read_chat(self.processing_class, row, place, tools=self.settings.tools)  # type: ignore[arg-type]
        kwargs = {**(self.settings.template_kwargs or {}), **chat.template_kwargs}
        with place.named():
            return render_prompt(self.processing_class, chat._replace(template_kwargs=kwargs))


def check_prompt_ids(prompt: list[int], settings: PromptPreparation, place: Place) -> None:
    """Raise ValueError for a prompt without tokens, with ids that the model does not have, or with too many."""
    longest = settings.longest
    if not prompt:
        raise place.error("a prompt without tokens", "at least 1", "Begin it with the tokenizer's bos token.")
    check_ids(prompt, Vocabulary(settings.vocabulary or 2**31, "the model's vocabulary"), place)
    if longest is not None and len(prompt) > longest:
        expected = f"at most {longest}: the completion needs room in the model's context, too"
        raise place.error(f"a prompt of {len(prompt)} tokens", expected, "Shorten or filter such prompts.")


class PromptSets:
    """The training and evaluation sets of one trainer that completes prompts.

    `context_length` is the most tokens of prompt and completion (None: unknown), `room` name and length of the latter.
    """

    def __init__(
        self, processing_class: ProcessingClass, settings: PromptPreparation, *, context_length: int | None,
        room: tuple[str, int | None],
    ) -> None:  # fmt: skip
        longest = None if context_length is None else context_length - 1
        self.processing_class, self.settings = processing_class, replace(settings, longest=longest)
        self.context_length, (self._name, self._room) = context_length, room

    def __call__(self, dataset: Any, name: str) -> Dataset:
        """A set with its prompts tokenised; a stream for evaluation is read whole. Raises: TypeError for others."""
        if isinstance(dataset, IterableDataset) and name != "train":
            dataset = stored_rows(dataset)
        if isinstance(dataset, list):
            kinds = ["messages" if isinstance(row.get("prompt"), list) else "text" for row in dataset]
            if odd := [index for index, kind in enumerate(kinds) if kind != kinds[0]]:
                remedy = "Do not mix the standard and the conversational format; convert one into the other."
                place, expected = Place(name, odd[0], "prompt"), f"{kinds[0]} as in row 0"
                raise place.error(kinds[odd[0]], expected, remedy, TypeError)
            dataset = Dataset.from_list(dataset)
        if not isinstance(dataset, Dataset):
            fault = "None" if dataset is None else f"of type {type(dataset).__name__}"
            raise TypeError(f"{name} dataset is {fault}, expected a Dataset. Use Dataset.from_list(rows).")
        with PartialState().main_process_first():
            prepared = self.prepared(dataset, name)
        if (length := self.context_length) is None or (room := self._room) is None:
            return prepared
        if short := sum(len(ids) > length - room for ids in prepared[PROMPT_IDS]):
            text = "%s dataset: %d of %d prompts leave less than %s=%d tokens of the context length %d to completions."
            logger.warning(text, name, short, len(prepared), self._name, room, length)
        return prepared

    def stream(self, dataset: IterableDataset, *, shuffle_seed: int | None) -> RowStream:
        """A training set whose rows are read and tokenised as they are needed; the first ones are checked now.

        `shuffle_seed` shuffles it in a buffer of `SHUFFLED_ROWS`, anew in each pass; None keeps its order. Raises:
        ValueError for images, and what `__call__` raises for the first rows.
        """
        if has_images(dataset):
            raise ValueError("train dataset is a stream with images, expected a Dataset. Do not stream it.")
        head = stored_rows(dataset.take(STREAM_BATCH))
        prepared = self(head, "train")
        tokenize = prompt_tokenizer(head, self.processing_class, self.settings, name="train")
        rows = dataset.with_format(None)
        if shuffle_seed is not None:
            rows = rows.shuffle(seed=shuffle_seed, buffer_size=SHUFFLED_ROWS)
        read = partial(tokenize, json_columns=json_columns(dataset))
        return RowStream(rows, head.column_names, prepared.column_names, read)

    def prepared(self, dataset: Dataset, name: str) -> Dataset:
        """The data set with a column `input_ids` of prompts; others stay, except masks of the prompts' tokens.

        A row has a `prompt`, text or messages, or is tokenised already: `input_ids`, perhaps an `attention_mask`.
        Raises: ValueError or TypeError, naming the row, for prompts that do not fit the settings.
        """
        kind = prompt_tokenizer(dataset, self.processing_class, self.settings, name=name)
        kept = [column for column in dataset.column_names if column not in _MASKS]
        rows = dataset.with_format(None)
        return kind.map(rows, num_proc=self.settings.num_proc, keep_columns=kept)  # type: ignore[return-value]

    def every(self, datasets: Any) -> Any:
        """An evaluation set, or each of several by name; None for none."""
        if isinstance(datasets, dict):
            return {name: self(part, name) for name, part in datasets.items()}
        return None if datasets is None else self(datasets, "eval")


def stored_rows(stream: IterableDataset) -> Dataset:
    """All rows of a stream as a stored data set."""
    return Dataset.from_list([dict(row) for row in stream.with_format(None)], features=stream.features)
