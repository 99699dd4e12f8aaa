"""Rows of unpaired preferences (or of pairs, taken apart) -> token ids, a batch of rows at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from trl.data.formats import common_prefix_length, is_conversational, maybe_convert_to_chatml
from trl.data.preference_lengths import Ids, PairLengths, Side, with_context
from trl.data.preference_rows import NOT_ANSWERING, PairReader
from trl.data.preference_tokens import check_number, closed
from trl.data.preparation import Vocabulary, check_ids
from trl.data.rendering import (
    Chat,
    ProcessingClass,
    TemplateRefusal,
    render_prompt,
    split_rendering,
    template_source,
    text_tokenizer,
)
from trl.data.spans import encode
from trl.data.tokenization import encode_closed, encode_open, read_chat
from trl.data.validation import Place, accepted_roles, check_answer, check_label, check_text

TOKEN_COLUMNS = ("prompt_input_ids", "completion_input_ids")
KL_COLUMNS = ("KL_completion_input_ids", "KL_prompt_input_ids")
EMBEDDING_COLUMN = "embedding_input_ids"
REFERENCE_LOGPS = ("reference_logps", "reference_KL_logps")
MARKS = 2  # places that are kept for a begin token and an eos
NO_MODEL_LIMIT = 10**9  # tokenizers without a length of their own have a larger one


class Sample(NamedTuple):
    """One completion behind its prompt, as text, and the row that it comes from."""

    prompt: str
    completion: str
    label: bool
    row: int


class Tokens(NamedTuple):
    """One completion behind its prompt before truncation, and its oddities."""

    prompt: Ids
    completion: Ids
    label: bool
    row: int
    shifted_rows: int = 0
    removed_begin_tokens: int = 0
    empty_completions: int = 0


class UnpairedCounts(NamedTuple):
    """What is counted of a row beside its tokens: columns that are taken off again once they are summed."""

    row: int
    tokens: int
    removed_tokens: int
    left_out: int  # 1 where truncation leaves nothing of the completion
    desirable: int
    equal_rows: int  # 1 where a pair's rejected completion is the chosen one too
    promptless_rows: int
    shifted_rows: int
    removed_begin_tokens: int
    empty_completions: int


@dataclass(frozen=True)
class UnpairedReader:
    """Reads prompt, completion and label off rows of one format, checked; off pairs twice of each.

    `pairs` reads rows of `chosen` and `rejected`; None for rows of `completion` and `label`.
    """

    processing_class: ProcessingClass
    kind: Literal["tokens", "text", "messages"]
    dataset_name: str
    pairs: PairReader | None = None

    def place(self, row: int, column: str) -> Place:
        return Place(self.dataset_name, row, column)

    def samples(self, row: dict[str, Any], index: int) -> list[Sample]:
        """The row's completions: the chosen before the rejected one, or the only one.

        Raises: TypeError or ValueError naming row, column and remedy.
        """
        if self.pairs is not None:
            read = self._pair_texts if self.kind == "text" else self._pair_chats
            chosen, rejected = read(self.pairs, row, index)
            return [Sample(*chosen, True, index), Sample(*rejected, False, index)]
        label = check_label(row.get("label"), self.place(index, "label"))
        read = self._text if self.kind == "text" else self._chat
        return [Sample(*read(row, index), label, index)]

    def _text(self, row: dict[str, Any], index: int) -> tuple[str, str]:
        prompt = check_text(row.get("prompt"), self.place(index, "prompt"), may_be_empty=True)
        return prompt, check_text(row.get("completion"), self.place(index, "completion"))

    def _chat(self, row: dict[str, Any], index: int) -> tuple[str, str]:
        roles = accepted_roles(template_source(self.processing_class))
        places = [self.place(index, column) for column in ("prompt", "completion")]
        prompt, answer = (read_chat(self.processing_class, row, place, roles=roles) for place in places)
        first = answer.messages[0]["role"]
        if first in NOT_ANSWERING:
            raise ValueError(
                f"{places[1]}, message 0: role {first!r}, expected the assistant's answer to 'prompt'. Give the answer only, "
                "and put what comes before it into the prompt."
            )
        check_answer(answer.messages, places[1])
        return self._rendered(prompt, answer.messages, places[1])

    def _pair_texts(self, pairs: PairReader, row: dict[str, Any], index: int) -> list[tuple[str, str]]:
        pair = pairs.text(row, index)
        return [(pair.prompt, answer) for answer in (pair.chosen, pair.rejected)]

    def _pair_chats(self, pairs: PairReader, row: dict[str, Any], index: int) -> list[tuple[str, str]]:
        pair, place = pairs.chat(row, index), self.place(index, "chosen")
        try:
            opened = render_prompt(self.processing_class, pair.prompt)
        except TemplateRefusal as error:
            raise ValueError(f"{place}: {error}") from error
        return [self._rendered(pair.prompt, answer, place, opened) for answer in (pair.chosen, pair.rejected)]

    def _rendered(
        self, prompt: Chat, answer: list[dict[str, Any]], place: Place, opened: str | None = None
    ) -> tuple[str, str]:
        try:
            return split_rendering(self.processing_class, prompt, answer, opened)
        except TemplateRefusal as error:
            raise ValueError(f"{place}: {error}") from error


@dataclass(frozen=True)
class CompletionLengths:
    """What is left of a completion and its prompt: `limits` in the order "prompt_first", for one completion.

    A prompt keeps the begin token that it starts with, a completion the eos that it ends with; a place is kept for both
    even where the tokenizer has none, as in the recorded runs.
    """

    limits: PairLengths
    begin: int | None
    eos: int | None

    def cut(self, prompt: Ids, completion: Ids) -> Side:
        """The two, cut; of the completion nothing but its eos may be left.

        >>> CompletionLengths(PairLengths(7, 2, order="prompt_first"), begin=1, eos=2).cut([1, 5, 6, 7], [8, 9, 9, 9, 2])
        Side(prompt=[1, 6, 7], completion=[8, 9, 9, 2])
        """
        if self.limits.is_encoder_decoder:
            return self._cut_apart(prompt, completion)
        beginning = prompt[:1] if prompt[:1] == [self.begin] else []
        content, ending = self._without_eos(completion)
        length = self.limits.max_length
        limits = self.limits if length is None else replace(self.limits, max_length=length - MARKS)
        side = limits.cut(prompt[len(beginning) :], [content])[0]
        return Side([*beginning, *side.prompt], [*side.completion, *ending])

    def _cut_apart(self, prompt: Ids, completion: Ids) -> Side:
        side, (_, ending) = self.limits.cut(prompt, [completion])[0], self._without_eos(completion)
        if len(side.completion) == len(completion) or not ending:
            return side
        return side._replace(completion=[*side.completion[:-1], *ending])

    def _without_eos(self, completion: Ids) -> tuple[Ids, Ids]:
        return (completion[:-1], completion[-1:]) if completion[-1:] == [self.eos] else (completion, [])

    def leaves_nothing(self, completion: Ids) -> bool:
        """Whether a cut completion holds at most its eos."""
        return not completion or completion == [self.eos]


@dataclass(frozen=True)
class UnpairedTokenizer:
    """Tokenises batches of rows for `datasets.Dataset.map` (batched, with indices); a pair becomes two rows.

    Prompt and completion are tokenised together, the completion begins at the first token that the prompt alone does
    not have; it ends with one eos. The two sides of an encoder-decoder are tokenised apart. `keep_whole` adds what a row
    was before it was cut, for the mismatched completions. `version` is part of the cache key of the prepared data set.
    """

    reader: UnpairedReader
    lengths: CompletionLengths
    add_special_tokens: bool = True
    vocabulary: Vocabulary | None = None
    embedding_tokenizer: PreTrainedTokenizerBase | None = None
    keep_whole: bool = False
    version: int = 2

    def __call__(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
        """Columns of tokens, labels and given numbers, and those of `UnpairedCounts`."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        if self.reader.kind == "tokens":
            tokens, extra = self._given(rows, batch, indices), {}
        else:
            samples = [s for index, row in zip(indices, rows, strict=True) for s in self.reader.samples(row, index)]  # fmt: skip
            tokens, extra = self._tokenized(samples), self._embedded(samples)
        finished = [self._finish(row) for row in tokens]
        if self.reader.pairs is not None:
            finished = _with_equal_marked(finished)
        columns = {name: [row[name] for row, _ in finished] for name in finished[0][0]}
        counts = {name: [getattr(c, name) for _, c in finished] for name in UnpairedCounts._fields}
        return {**columns, **extra, **self._numbers(batch, indices), **counts}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return text_tokenizer(self.reader.processing_class)

    def _numbers(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list[float]]:
        given = [name for name in REFERENCE_LOGPS if name in batch and self.reader.pairs is None]
        return {
            name: [check_number(value, self.reader.place(i, name)) for i, value in zip(indices, batch[name], strict=True)]
            for name in given
        }  # fmt: skip

    def _tokenized(self, samples: Sequence[Sample]) -> list[Tokens]:
        tokenize = self._apart if self.lengths.limits.is_encoder_decoder else self._together
        made = tokenize(samples, self.add_special_tokens and self.reader.kind == "text")
        if self.vocabulary is not None:
            for column in ("prompt", "completion"):
                ids = [getattr(row, column) or [0] for row in made]
                check_ids(ids, self.vocabulary, self.reader.dataset_name, made[0].row, column)
        return made

    def _together(self, samples: Sequence[Sample], special: bool) -> list[Tokens]:
        prompts = dict.fromkeys(sample.prompt for sample in samples)
        texts = [*prompts, *(sample.prompt + sample.completion for sample in samples)]
        encoded = encode_open(self.tokenizer, texts, add_special_tokens=special)
        heads = dict(zip(prompts, encoded, strict=False))
        rows = []
        for sample, (whole, removed) in zip(samples, encoded[len(prompts) :], strict=True):
            head, ids = heads[sample.prompt][0], closed(whole, self._eos)
            boundary = common_prefix_length(head, ids)
            shifted = int(boundary < len(head))
            rows.append(
                Tokens(ids[:boundary], ids[boundary:], sample.label, sample.row, shifted, removed, int(not sample.completion))
            )  # fmt: skip
        return rows

    def _apart(self, samples: Sequence[Sample], special: bool) -> list[Tokens]:
        texts = list(dict.fromkeys(sample.prompt for sample in samples))
        encoded = encode_closed(self.tokenizer, texts, add_special_tokens=special)
        prompts = dict(zip(texts, encoded, strict=True))
        answers = encode(self.tokenizer, [sample.completion for sample in samples])
        return [
            Tokens(prompts[sample.prompt][0], closed(ids, self._eos), sample.label, sample.row,
                   removed_begin_tokens=prompts[sample.prompt][1], empty_completions=int(not sample.completion))
            for sample, ids in zip(samples, answers, strict=True)
        ]  # fmt: skip

    @property
    def _eos(self) -> int:
        return self.tokenizer.eos_token_id  # type: ignore[return-value]

    def _embedded(self, samples: Sequence[Sample]) -> dict[str, list[Ids]]:
        """The prompts under the tokenizer of the embedding model, cut to what that takes."""
        tokenizer = self.embedding_tokenizer
        if tokenizer is None:
            return {}
        texts = list(dict.fromkeys(sample.prompt for sample in samples))
        truncation = tokenizer.model_max_length < NO_MODEL_LIMIT
        encoded = tokenizer(texts, truncation=truncation, verbose=False)["input_ids"]
        ids = dict(zip(texts, encoded, strict=True))  # type: ignore[arg-type]
        return {EMBEDDING_COLUMN: [ids[sample.prompt] for sample in samples]}

    def _given(self, rows: list[dict], batch: Mapping[str, list], indices: Sequence[int]) -> list[Tokens]:
        for column in (name for name in (*TOKEN_COLUMNS, KL_COLUMNS[0]) if name in batch):
            check_ids(batch[column], self.vocabulary, self.reader.dataset_name, indices[0], column)  # type: ignore[arg-type]
        return [
            Tokens(list(row["prompt_input_ids"]), list(row["completion_input_ids"]),
                   check_label(row["label"], self.reader.place(index, "label")), index)
            for index, row in zip(indices, rows, strict=True)
        ]  # fmt: skip

    def _finish(self, tokens: Tokens) -> tuple[dict[str, Any], UnpairedCounts]:
        try:
            cut = self.lengths.cut(tokens.prompt, tokens.completion)
        except ValueError as error:
            raise ValueError(f"{self.reader.place(tokens.row, TOKEN_COLUMNS[0])}: {error}") from error
        removed = len(tokens.prompt) + len(tokens.completion) - len(cut.prompt) - len(cut.completion)
        side = cut if self.lengths.limits.is_encoder_decoder else with_context(cut)
        row: dict[str, Any] = {**dict(zip(TOKEN_COLUMNS, side, strict=True)), "label": tokens.label}
        if self.keep_whole:
            row |= dict(
                zip(WHOLE, (tokens.prompt, tokens.completion) if removed else (None, None), strict=True)
            )
        return row, UnpairedCounts(
            row=tokens.row,
            tokens=len(side.prompt) + len(side.completion),
            removed_tokens=removed,
            left_out=int(
                not side.completion or (removed > 0 and self.lengths.leaves_nothing(cut.completion))
            ),
            desirable=int(tokens.label),
            equal_rows=0,
            promptless_rows=int(not cut.prompt),
            shifted_rows=tokens.shifted_rows,
            removed_begin_tokens=tokens.removed_begin_tokens,
            empty_completions=tokens.empty_completions,
        )


Finished = list[tuple[dict[str, Any], UnpairedCounts]]


def _with_equal_marked(pairs: Finished) -> Finished:
    """Rows of pairs, chosen and rejected in turn, with the rejected ones marked that are what the chosen one is."""
    marked = list(pairs)
    for index in range(1, len(pairs), 2):
        row, counts = pairs[index]
        is_equal = all(row[column] == pairs[index - 1][0][column] for column in TOKEN_COLUMNS)
        marked[index] = row, counts._replace(equal_rows=int(is_equal))
    return marked


WHOLE = ("whole_prompt", "whole_completion")


@dataclass(frozen=True)
class Mismatching:
    """Adds to each row the completion of the row before it among `group` rows, cut behind this row's prompt (for KTO).

    The first row of a group gets its last row's. With `same_label` (rows of pairs) rows of the other label are passed over.
    For `datasets.Dataset.map` in batches of whole groups.
    """

    lengths: CompletionLengths
    group: int
    same_label: bool = False
    version: int = 2

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        """Columns `KL_completion_input_ids`, and `KL_prompt_input_ids` where the prompt was cut in another way."""
        wholes = [
            [whole or cut for whole, cut in zip(batch[column], batch[name], strict=True)]
            for column, name in zip(WHOLE, TOKEN_COLUMNS, strict=True)
        ]
        sides = [
            self._side(wholes[0][row], wholes[1][other])
            for row, other in enumerate(partners(batch["label"], self.group, same_label=self.same_label))
        ]
        own = zip(sides, batch["prompt_input_ids"], strict=True)
        return {
            "KL_completion_input_ids": [side.completion for side in sides],
            "KL_prompt_input_ids": [None if side.prompt == prompt else side.prompt for side, prompt in own],
        }

    def _side(self, prompt: Ids, completion: Ids) -> Side:
        side = self.lengths.cut(prompt, completion)
        return side if self.lengths.limits.is_encoder_decoder else with_context(side)


def partners(labels: Sequence[bool], group: int, *, same_label: bool = False) -> list[int]:
    """Of each row, the one before it in its group of `group` rows; of a group's first row, its last one.

    With `same_label` the nearest one before it that has its label, where there is one.

    >>> partners([True, False, True, True, False, True, False], 3)
    [2, 0, 1, 5, 3, 4, 6]
    >>> partners([True, False, True, False], 4, same_label=True)
    [2, 3, 0, 1]
    """
    found = []
    for row, label in enumerate(labels):
        start = row - row % group
        size = min(group, len(labels) - start)
        before = (start + (row - start - step) % size for step in range(1, size))
        alike = (other for other in before if not same_label or labels[other] == label)
        found.append(next(alike, start + (row - start - 1) % size))
    return found


def row_kind(first_row: Mapping[str, Any]) -> Literal["text", "messages"]:
    """Whether an unpaired row is text or messages."""
    row = maybe_convert_to_chatml(dict(first_row))
    chat = is_conversational({key: row.get(key) for key in ("prompt", "completion")})
    return "messages" if chat else "text"
