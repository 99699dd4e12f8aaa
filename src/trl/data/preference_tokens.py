"""Rows of paired preferences -> token ids, a batch of rows at a time, and what was counted on the way."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from trl.data.formats import common_prefix_length
from trl.data.preference_lengths import Ids, PairLengths, Side, with_context
from trl.data.preference_rows import (
    OLDER_REWARD_COLUMNS,
    PAIR_COLUMNS,
    SIDES,
    ChatPair,
    PairReader,
    TextPair,
)
from trl.data.preparation import Vocabulary, check_ids
from trl.data.rendering import (
    ProcessingClass,
    TemplateRefusal,
    render_prompt,
    split_rendering,
    text_tokenizer,
)
from trl.data.spans import encode
from trl.data.templates import shared_prompt
from trl.data.tokenization import encode_closed, encode_open
from trl.data.validation import Place

# The prompt of a rejected completion, where truncation (or an empty prompt) gave it another than the chosen one has.
OWN_PROMPT = "rejected_prompt_input_ids"
REFERENCE_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")
NO_LIMITS = PairLengths()


class Tokens(NamedTuple):
    """A row before truncation: a prompt (empty for reward models) and two completions, and its oddities."""

    prompt: Ids
    chosen: Ids
    rejected: Ids
    own_prompt: Ids | None = None
    shifted_boundaries: int = 0
    removed_begin_tokens: int = 0
    empty_completions: int = 0
    repeated_prompts: int = 0


class RowCounts(NamedTuple):
    """What is counted of a row beside its tokens: columns that are taken off again once they are summed."""

    row: int
    tokens: int
    removed_tokens: int
    left_out: int  # 1 where nothing can be learned from the row
    equal_rows: int
    promptless_rows: int
    shifted_rows: int
    removed_begin_tokens: int
    empty_completions: int
    repeated_prompts: int


@dataclass(frozen=True)
class PairTokenizer(ABC):
    """Tokenises batches of preference rows for `datasets.Dataset.map` (batched, with indices).

    Subclasses say what a row becomes. `version` is part of the cache key of the prepared data set.
    """

    reader: PairReader
    add_special_tokens: bool = True
    vocabulary: Vocabulary | None = None
    version: int = 1

    def __call__(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
        """The row's token columns, those of `RowCounts`, and kept columns whose numbers are checked."""
        tokenized = self._token_rows(batch, indices) if self._are_tokens else self._made_rows(batch, indices)
        rows = [self.finish(tokens, index) for tokens, index in zip(tokenized, indices, strict=True)]
        columns = {name: [row[name] for row, _ in rows] for name in self.columns}
        counts = {name: [getattr(counts, name) for _, counts in rows] for name in RowCounts._fields}
        if self.vocabulary is not None and not self._are_tokens:
            self._check_made(columns, indices)
        kept = {name: self._numbers(batch[name], indices, name) for name in self.numbers if name in batch}
        return {**columns, **kept, **counts}

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The token columns of a row."""

    @property
    @abstractmethod
    def numbers(self) -> tuple[str, ...]:
        """Columns of numbers that are kept where the rows have them."""

    @abstractmethod
    def text_rows(self, rows: list[dict], indices: Sequence[int]) -> list[Tokens]:
        """Rows of text, tokenised."""

    @abstractmethod
    def chat_rows(self, rows: list[dict], indices: Sequence[int]) -> list[Tokens]:
        """Rows of messages, tokenised."""

    @abstractmethod
    def finish(self, tokens: Tokens, index: int) -> tuple[dict[str, Ids | None], RowCounts]:
        """The columns that a row becomes, and its counts."""

    @property
    def _are_tokens(self) -> bool:
        return self.reader.row_type.kind == "tokens"

    @property
    def processing_class(self) -> ProcessingClass:
        return self.reader.processing_class

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return text_tokenizer(self.processing_class)

    def _numbers(self, values: list, indices: Sequence[int], column: str) -> list[float]:
        return [check_number(v, self.reader.place(i, column)) for i, v in zip(indices, values, strict=True)]

    def _check_made(self, columns: Mapping[str, list], indices: Sequence[int]) -> None:
        for name in ("chosen_input_ids", "rejected_input_ids", "prompt_input_ids"):
            rows = [row or [0] for row in columns.get(name, [])]  # empty ones are left out later, and counted
            check_ids(rows, self.vocabulary, self.reader.dataset_name, indices[0], name)  # type: ignore[arg-type]

    def _token_rows(self, batch: dict[str, list], indices: Sequence[int]) -> list[Tokens]:
        row_type, name = self.reader.row_type, self.reader.dataset_name
        columns = (*row_type.columns, *(["prompt_input_ids"] if row_type.has_prompt else []))
        for column in columns:
            check_ids(batch[column], self.vocabulary, name, indices[0], column)  # type: ignore[arg-type]
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        return [self._given(row, index) for row, index in zip(rows, indices, strict=True)]

    def _given(self, row: dict[str, Any], index: int) -> Tokens:
        columns = self.reader.row_type.columns
        if columns == OLDER_REWARD_COLUMNS:
            chosen, rejected = (self._unpadded(row, index, side) for side in SIDES)
            return Tokens([], chosen, rejected)
        prompt = list(row["prompt_input_ids"]) if self.reader.row_type.has_prompt else []
        own = row.get(OWN_PROMPT)
        chosen, rejected = list(row["chosen_input_ids"]), list(row["rejected_input_ids"])
        return Tokens(prompt, chosen, rejected, None if own is None else list(own))

    def _unpadded(self, row: dict[str, Any], index: int, side: str) -> Ids:
        ids, column = row[f"input_ids_{side}"], f"attention_mask_{side}"
        mask = row.get(column)
        if mask is None:
            return list(ids)
        if len(mask) != len(ids) or not any(mask):
            raise ValueError(
                f"{self.reader.place(index, column)}: {len(mask)} values ({sum(map(bool, mask))} not 0) for {len(ids)} tokens in "
                f"'input_ids_{side}', expected as many, and at least one that is 1. Give 1 for each token, 0 for padding."
            )
        return [token for token, is_real in zip(ids, mask, strict=True) if is_real]

    def _made_rows(self, batch: dict[str, list], indices: Sequence[int]) -> list[Tokens]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        made = self.text_rows if self.reader.row_type.kind == "text" else self.chat_rows
        return made(rows, indices)

    def rendered(self, function: Callable[..., Any], place: Place, *arguments: Any) -> Any:
        """`function(processing_class, *arguments)`, with the place added to what the chat template complains about."""
        try:
            return function(self.processing_class, *arguments)
        except TemplateRefusal as error:
            raise ValueError(f"{place}: {error}") from error


def check_number(value: Any, place: Place) -> float:
    """The number at a place.

    Raises: TypeError for what is no number, ValueError for None, infinities and NaN.
    """
    if value is None:
        raise ValueError(f"{place}: None, expected a number. Fill it in or filter the row out.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{place}: {value!r} is of type {type(value).__name__}, expected a number. Convert it with float()."
        )
    if not math.isfinite(value):
        raise ValueError(f"{place}: {value}, expected a finite number. Correct it or filter the row out.")
    return float(value)


@dataclass(frozen=True)
class PreferenceTokenizer(PairTokenizer):
    """Rows as `prompt_input_ids`, `chosen_input_ids`, `rejected_input_ids`, cut to `lengths`.

    Prompt and completion are tokenised together; the completions begin at the first token that the prompt alone does
    not have, or that the two do not share, so none of their text is lost and the tokens are those of the whole text. Each
    ends with one eos. The two sides of an encoder-decoder are tokenised apart, the prompt with an eos of its own.
    """

    lengths: PairLengths = NO_LIMITS

    @property
    def columns(self) -> tuple[str, ...]:
        return (*PAIR_COLUMNS, OWN_PROMPT)

    @property
    def numbers(self) -> tuple[str, ...]:
        return REFERENCE_LOGPS

    def text_rows(self, rows: list[dict], indices: Sequence[int]) -> list[Tokens]:
        texts = [self.reader.text(row, index) for index, row in zip(indices, rows, strict=True)]
        if self.lengths.is_encoder_decoder:
            made = self._apart(texts, add_special_tokens=self.add_special_tokens)
        else:
            made = self._together(texts, add_special_tokens=self.add_special_tokens)
        if not self.reader.row_type.has_prompt:  # the two may part within a token: nobody chose the boundary
            made = [tokens._replace(shifted_boundaries=0) for tokens in made]
        return [
            tokens._replace(empty_completions=int(not (text.chosen and text.rejected)))
            for tokens, text in zip(made, texts, strict=True)
        ]

    def chat_rows(self, rows: list[dict], indices: Sequence[int]) -> list[Tokens]:
        pairs = [self.reader.chat(row, index) for index, row in zip(indices, rows, strict=True)]
        texts = [
            TextPair(*self.rendered(_render_pair, self.reader.place(index, "chosen"), pair))
            for index, pair in zip(indices, pairs, strict=True)
        ]
        tokenize = self._apart if self.lengths.is_encoder_decoder else self._together
        return [
            tokens._replace(repeated_prompts=int(pair.is_repeated))
            for tokens, pair in zip(tokenize(texts, add_special_tokens=False), pairs, strict=True)
        ]

    def _together(self, texts: list[TextPair], *, add_special_tokens: bool) -> list[Tokens]:
        joint = [text.prompt + answer for text in texts for answer in (text.chosen, text.rejected)]
        prompts = [text.prompt for text in texts]
        encoded = encode_open(self.tokenizer, [*prompts, *joint], add_special_tokens=add_special_tokens)
        eos: int = self.tokenizer.eos_token_id  # type: ignore[assignment]
        heads, wholes = encoded[: len(texts)], encoded[len(texts) :]
        return [
            _split_pair(head, closed(chosen, eos), closed(rejected, eos), removed)
            for (head, _), (chosen, removed), (rejected, _) in zip(
                heads, wholes[::2], wholes[1::2], strict=True
            )
        ]

    def _apart(self, texts: list[TextPair], *, add_special_tokens: bool) -> list[Tokens]:
        prompts = encode_closed(
            self.tokenizer, [text.prompt for text in texts], add_special_tokens=add_special_tokens
        )
        answers = encode(
            self.tokenizer, [answer for text in texts for answer in (text.chosen, text.rejected)]
        )
        eos: int = self.tokenizer.eos_token_id  # type: ignore[assignment]
        return [
            Tokens(prompt, closed(chosen, eos), closed(rejected, eos), removed_begin_tokens=removed)
            for (prompt, removed), chosen, rejected in zip(prompts, answers[::2], answers[1::2], strict=True)
        ]

    def finish(self, tokens: Tokens, index: int) -> tuple[dict[str, Ids | None], RowCounts]:
        try:
            cut = self._cut(tokens)
        except ValueError as error:
            raise ValueError(f"{self.reader.place(index, 'prompt_input_ids')}: {error}") from error
        promptless = any(not side.prompt for side in cut)
        chosen, rejected = cut if self.lengths.is_encoder_decoder else map(with_context, cut)
        own = rejected.prompt if rejected.prompt != chosen.prompt else None
        row = dict(
            zip(self.columns, (chosen.prompt, chosen.completion, rejected.completion, own), strict=True)
        )
        return row, RowCounts(
            row=index,
            tokens=sum(len(ids) for ids in row.values() if ids),
            removed_tokens=_removed(tokens, cut),
            left_out=int(not (chosen.completion and rejected.completion)),
            equal_rows=int(own is None and chosen.completion == rejected.completion),
            promptless_rows=int(promptless),
            shifted_rows=tokens.shifted_boundaries,
            removed_begin_tokens=tokens.removed_begin_tokens,
            empty_completions=tokens.empty_completions,
            repeated_prompts=tokens.repeated_prompts,
        )

    def _cut(self, tokens: Tokens) -> list[Side]:
        if tokens.own_prompt is None:
            return self.lengths.cut(tokens.prompt, [tokens.chosen, tokens.rejected])
        sides = ((tokens.prompt, tokens.chosen), (tokens.own_prompt, tokens.rejected))
        return [side for prompt, completion in sides for side in self.lengths.cut(prompt, [completion])]


def _render_pair(processing_class: ProcessingClass, pair: ChatPair) -> TextPair:
    opened = render_prompt(processing_class, pair.prompt)
    pieces = [
        split_rendering(processing_class, pair.prompt, answer, opened)
        for answer in (pair.chosen, pair.rejected)
    ]
    shared = shared_prompt([head for head, _ in pieces])
    chosen, rejected = ("".join(piece)[len(shared) :] for piece in pieces)
    return TextPair(shared, chosen, rejected)


def _split_pair(head: Ids, chosen: Ids, rejected: Ids, removed_begin_tokens: int) -> Tokens:
    boundary = min(common_prefix_length(head, chosen), common_prefix_length(head, rejected))
    return Tokens(
        head[:boundary],
        chosen[boundary:],
        rejected[boundary:],
        shifted_boundaries=int(boundary < len(head)),
        removed_begin_tokens=removed_begin_tokens,
    )


def _removed(tokens: Tokens, cut: list[Side]) -> int:
    """How many tokens truncation took: of the prompt as many as the side that lost more of it."""
    prompts = (tokens.prompt, tokens.prompt if tokens.own_prompt is None else tokens.own_prompt)
    of_prompt = max(len(prompt) - len(side.prompt) for prompt, side in zip(prompts, cut, strict=True))
    completions = len(tokens.chosen) + len(tokens.rejected) - sum(len(side.completion) for side in cut)
    return of_prompt + completions


def closed(ids: Ids, eos: int) -> Ids:
    """The ids with an eos at their end, unless they have it.

    >>> closed([5, 6], 2), closed([5, 2], 2)
    ([5, 6, 2], [5, 2])
    """
    return ids if ids and ids[-1] == eos else [*ids, eos]


def tokenize_preference_row(
    features: Mapping[str, str],
    processing_class: ProcessingClass,
    max_prompt_length: int | None = None,
    max_completion_length: int | None = None,
    add_special_tokens: bool = True,
) -> dict[str, list[int]]:
    """One row of text as token ids, as the 0.26 trainers' `tokenize_row` gives them: every part tokenised by itself.

    `features` holds `prompt`, `chosen` and `rejected`. The completions get an eos and keep their first
    `max_completion_length` tokens, the prompt keeps its last `max_prompt_length`; with `add_special_tokens` (for
    encoder-decoders) it stands between a begin token, where the tokenizer has one, and an eos. Training data is prepared
    by `prepare_preference_dataset`, which tokenises prompt and completion together.

    Raises: ValueError where the tokenizer has no eos token.
    """
    tokenizer = text_tokenizer(processing_class)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos token, expected one to close the completions with. Set tokenizer.eos_token."
        )
    prompt, chosen, rejected = encode(tokenizer, [features[key] for key in ("prompt", *SIDES)])
    eos = [tokenizer.eos_token_id]
    if add_special_tokens:
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        prompt = begin + prompt + eos
    return {  # type: ignore[return-value]
        "prompt_input_ids": prompt if max_prompt_length is None else prompt[-max_prompt_length:],
        "chosen_input_ids": (chosen + eos)[:max_completion_length],
        "rejected_input_ids": (rejected + eos)[:max_completion_length],
    }
