"""Text data of older programs: formatting functions, rows of constant length, missing begin and end tokens, prompts."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal

import datasets
import torch
from datasets import Dataset, Value
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from trl.data.formats import Row, RowDict
from trl.legacy.interface import NOT_CALLED, NOT_CALLED_OF_GROUPS, LegacyGroups, NotCalled, View

FormattingFunction = Callable[[RowDict], str | list[str]]
MessagesField = Literal["messages", "conversations"]

Tokens = dict[str, list[int]]

MESSAGE_COLUMNS: tuple[MessagesField, ...] = ("messages", "conversations")
INSTRUCTION_COLUMNS = ("prompt", "completion")
_TEXT = Value("string")
FORMAT_MAPPING = {
    "chatml": [{"content": _TEXT, "role": _TEXT}],
    "instruction": dict.fromkeys(("completion", "prompt"), _TEXT),
}


def conversations_formatting_function(
    tokenizer: PreTrainedTokenizerBase, messages_field: MessagesField, tools: list | None = None
) -> FormattingFunction:
    """A function that renders `row[messages_field]`, of one row or of a batch, with the chat template."""

    def format_row(row: RowDict) -> str | list[str]:
        messages = row[messages_field]
        if messages and isinstance(messages[0], list):
            return [format_row({messages_field: conversation}) for conversation in messages]  # type: ignore[misc]
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))

    return format_row


def instructions_formatting_function(tokenizer: PreTrainedTokenizerBase) -> FormattingFunction:
    """A function that renders `prompt` and `completion`, of one row or of a batch, with the chat template."""

    def format_row(row: RowDict) -> str | list[str]:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list):
            pairs = zip(prompt, completion, strict=True)
            return [format_row({"prompt": one, "completion": other}) for one, other in pairs]  # type: ignore[misc]
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    return format_row


def get_formatting_func_from_dataset(
    dataset: Dataset | datasets.IterableDataset, tokenizer: PreTrainedTokenizerBase, tools: list | None = None
) -> FormattingFunction | None:
    """The function that fits the columns (messages, or `prompt` and `completion` as text), None without one."""
    features = dataset.features or {}
    for name in MESSAGE_COLUMNS:
        if name in features and _is_messages(features[name]):
            return conversations_formatting_function(tokenizer, name, tools)
    if all(_is_text(features.get(name)) for name in INSTRUCTION_COLUMNS):
        return instructions_formatting_function(tokenizer)
    return None


def _is_text(feature: object) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_messages(feature: object) -> bool:
    message = getattr(feature, "feature", feature)  # a list of dicts, or datasets 3's list of length one
    if isinstance(message, list):
        message = message[0]
    return isinstance(message, dict) and all(_is_text(message.get(key)) for key in ("role", "content"))


class ConstantLengthDataset(IterableDataset):
    """A stream of `{"input_ids", "labels"}`, int64 `(seq_length,)` each, cut through a stream of joined texts.

    Texts are read until a buffer holds `seq_length * chars_per_token * num_of_sequences` characters, tokenized, joined
    (with `eos_token_id` after each if `append_concat_token`) and cut; what does not fill a row is left out. Newer
    programs use `packing=True` with `packing_strategy="wrapped"`.

    `formatting_func(row)` makes the text of a row, or `dataset_text_field` has it. The tokenizer's `eos_token_id` wins.
    `infinite` begins again when the rows end. With `shuffle` the rows of a buffer come in the order of `seed`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, dataset: Iterable[RowDict], dataset_text_field: str | None = None,
        formatting_func: Callable[[RowDict], str] | None = None, infinite: bool = False, seq_length: int = 1024,
        num_of_sequences: int = 1024, chars_per_token: float = 3.6, eos_token_id: int = 0, shuffle: bool = True,
        append_concat_token: bool = True, add_special_tokens: bool = True, *, seed: int = 0,
    ) -> None:  # fmt: skip
        if (dataset_text_field is None) == (formatting_func is None):
            both = f"dataset_text_field is {dataset_text_field!r} and formatting_func is {formatting_func!r}"
            raise ValueError(f"{both}, expected exactly one of them. Name a column, or give a function.")
        if seq_length < 1:
            raise ValueError(f"seq_length must be >= 1, got {seq_length}. Give the number of tokens in a row.")
        last = tokenizer.eos_token_id
        self.concat_token_id: int = eos_token_id if last is None else last  # type: ignore[assignment]
        self.tokenizer, self.dataset, self.seq_length, self.infinite = tokenizer, dataset, seq_length, infinite
        self.max_buffer_size = seq_length * chars_per_token * num_of_sequences
        self.append_concat_token, self.add_special_tokens = append_concat_token, add_special_tokens
        self.shuffle, self.seed = shuffle, seed
        self.formatting_func = formatting_func or (lambda row: row[dataset_text_field])

    @property
    def column_names(self) -> list[str] | None:
        """Columns of the rows underneath."""
        return getattr(self.dataset, "column_names", None)

    def __len__(self) -> int:
        """The number of rows underneath, as in TRL; not that of the rows of `seq_length` tokens."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order, texts, characters = random.Random(self.seed), list[str](), 0
        for text in self._texts():
            texts.append(text)
            characters += len(text)
            if characters >= self.max_buffer_size:
                yield from self._rows(texts, order)
                texts, characters = [], 0
        if texts:
            yield from self._rows(texts, order)

    def _texts(self) -> Iterator[str]:
        while True:
            is_empty = True
            for row in self.dataset:
                is_empty, text = False, self.formatting_func(row)
                if not isinstance(text, str):
                    fault = f"the text of a row is a {type(text).__name__}, expected a string"
                    raise TypeError(f"{fault}. Let formatting_func return one per row.")
                yield text
            if not self.infinite:
                return
            if is_empty:
                raise ValueError("the data set has no rows, expected at least 1 to repeat. Check where it comes from.")
            warnings.warn("The rows have ended and begin again.", stacklevel=2)

    def _rows(self, texts: list[str], order: random.Random) -> Iterator[dict[str, torch.Tensor]]:
        options: Any = {"add_special_tokens": self.add_special_tokens, "truncation": False}
        end = [self.concat_token_id] if self.append_concat_token else []
        joined = [token for ids in self.tokenizer(texts, **options)["input_ids"] for token in [*ids, *end]]
        last = len(joined) - len(joined) % self.seq_length
        starts = range(0, last, self.seq_length)
        rows = [torch.tensor(joined[start : start + self.seq_length]) for start in starts]
        if self.shuffle:
            order.shuffle(rows)
        for row in rows:
            yield {"input_ids": row, "labels": row.clone()}


def add_bos_token_if_needed(
    bos_token_id: int | None, prompt_len_input_ids: int, prompt_tokens: Tokens, chosen_prompt_len_input_ids: int,
    chosen_tokens: Tokens, rejected_prompt_len_input_ids: int, rejected_tokens: Tokens,
) -> tuple[Tokens, Tokens, Tokens]:  # fmt: skip
    """Begin `prompt_input_ids` of the prompt, and of the prompt as it stands before each answer, with the begin token.

    `*_len_input_ids` are their lengths in tokens. Those that begin with it stay as they are, and so does everything
    where there is none (`bos_token_id=None`). `prompt_attention_mask` goes along. The dicts are changed in place.

    >>> tokens = [{"prompt_input_ids": ids, "prompt_attention_mask": [1]} for ids in ([1], [1], [5])]
    >>> answers = add_bos_token_if_needed(1, 1, tokens[0], 1, tokens[1], 1, tokens[2])
    >>> [answer["prompt_input_ids"] for answer in answers]
    [[1], [1], [1, 5]]
    """
    lengths = (prompt_len_input_ids, chosen_prompt_len_input_ids, rejected_prompt_len_input_ids)
    rows = (prompt_tokens, chosen_tokens, rejected_tokens)
    for length, tokens in zip(lengths, rows, strict=True):
        missing = length == 0 or tokens["prompt_input_ids"][0] != bos_token_id
        if bos_token_id is not None and missing:
            tokens["prompt_input_ids"] = [bos_token_id, *tokens["prompt_input_ids"]]
            tokens["prompt_attention_mask"] = [1, *tokens["prompt_attention_mask"]]
    return rows


def add_eos_token_if_needed(
    eos_token_id: int, chosen_tokens: RowDict, rejected_tokens: RowDict
) -> tuple[RowDict, RowDict]:
    """End `input_ids` of both answers with the end token, unless they do; `attention_mask` goes along. In place.

    >>> pair = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in ([5, 2], [6])]
    >>> [answer["input_ids"] for answer in add_eos_token_if_needed(2, *pair)]
    [[5, 2], [6, 2]]
    """
    for tokens in (chosen_tokens, rejected_tokens):
        if tokens["input_ids"][-1:] != [eos_token_id]:
            tokens["input_ids"] = [*tokens["input_ids"], eos_token_id]
            tokens["attention_mask"] = [*tokens["attention_mask"], 1]
    return chosen_tokens, rejected_tokens


class LegacyPromptRows(LegacyGroups):
    """Attributes of `OnlineDPOTrainer`, and rows of prompts as its methods make them; training does not call these."""

    _not_called: ClassVar[NotCalled] = {
        **NOT_CALLED_OF_GROUPS,
        **dict.fromkeys(("tokenize_row", "process_vision_row"), NOT_CALLED["tokenize_row"]),
    }
    beta = View("method.beta")  # of the present epoch
    judge = View(lambda trainer: getattr(trainer.method.judge, "inner", None))

    @staticmethod
    def tokenize_row(feature: Row, is_encoder_decoder: bool, tokenizer: PreTrainedTokenizerBase) -> RowDict:
        """A row with `prompt_input_ids` and `prompt_attention_mask`; for decoders after the begin token."""
        ids = [int(token) for token in tokenizer(feature["prompt"], add_special_tokens=False)["input_ids"]]  # type: ignore[union-attr]
        begin = tokenizer.bos_token_id
        if not is_encoder_decoder and isinstance(begin, int) and ids[:1] != [begin]:
            ids = [begin, *ids]
        return {**feature, "prompt_input_ids": ids, "prompt_attention_mask": [1] * len(ids)}

    def process_vision_row(self, features: RowDict, processing_class: Any = None) -> RowDict:
        """A row with `prompt` and `images` as the processor makes it."""
        processor: Any = processing_class or self.processing_class
        inputs = processor(images=features["images"], text=features["prompt"], add_special_tokens=False)
        names = {"input_ids": "prompt_input_ids", "attention_mask": "prompt_attention_mask"}
        return {str(names.get(name, name)): value[0] for name, value in inputs.items()}
