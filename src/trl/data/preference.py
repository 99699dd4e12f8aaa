"""A data set of paired preferences -> token rows for the pair losses and for reward models, and a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

from datasets import Dataset, List, Value

from trl.data.formats import column_names
from trl.data.pipeline import (
    TEXTS,
    AnyDataset,
    Preparation,
    PreparationReport,
    RowKind,
    Text,
    Vocabulary,
    allowed_ids,
    check_ids,
    first_row,
    prepare_rows,
)
from trl.data.preference_lengths import Ids, PairLengths, Side, TruncationMode, TruncationOrder, with_context
from trl.data.preference_rows import OLDER_REWARD_COLUMNS, PAIR_COLUMNS, SIDES, PairReader, pair_row_type
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.data.templates import shared_prompt
from trl.data.text import with_eos
from trl.data.tokenization import Split, encode, encode_closed, rows_of, tokenize_split
from trl.data.validation import Place, check_number

# The prompt of a rejected completion, where truncation (or an empty prompt) gave it another than the chosen one has.
OWN_PROMPT = "rejected_prompt_input_ids"
REFERENCE_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")
REWARD_TEXTS = {
    **TEXTS,
    "untrained_rows": Text(
        "{0.untrained_rows} longer than max_length",
        "{0.untrained_rows} of {0.rows} rows (first: {0.first[untrained_rows]}) have a sequence of more than max_length "
        "tokens; {0.dropped_rows} of them were dropped. Raise max_length to train on them.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class RewardPreparation(Preparation):
    """How rows of preferences become whole sequences; longer ones than `max_length` are dropped, or an error.

    `tools` replace the rows' own column `tools`.
    """

    eos_token: str | None = None
    tools: list | None = None
    untrained_rows: Literal["drop", "error"] = "drop"
    policies = ("drop", "error")

    @property
    def lengths(self) -> PairLengths:
        """The limits of the sequences."""
        return PairLengths(self.max_length)

    @property
    def sequences(self) -> tuple[tuple[str, ...], ...]:
        return tuple((f"{side}_input_ids",) for side in SIDES)


@dataclass(frozen=True, kw_only=True)
class PreferencePreparation(RewardPreparation):
    """How rows of preferences become prompts and completions; for the lengths see `PairLengths`.

    Rows that lose a whole completion to truncation are dropped, or an error; "error" also refuses rows that lose their
    whole prompt, which "drop" counts.
    """

    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: TruncationMode = "keep_end"
    truncation_order: TruncationOrder = "sequence"
    is_encoder_decoder: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.lengths  # whose constructor checks them

    @property
    def sequences(self) -> tuple[tuple[str, ...], ...]:
        return tuple((PAIR_COLUMNS[0], completion) for completion in PAIR_COLUMNS[1:])

    @property
    def lengths(self) -> PairLengths:
        return PairLengths(**{item.name: getattr(self, item.name) for item in fields(PairLengths)})


def prepare_preference_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    settings: PreferencePreparation,
    *,
    name: str = "train",
) -> tuple[AnyDataset, PreparationReport]:
    """The data set as rows of `prompt_input_ids`, `chosen_input_ids`, `rejected_input_ids`, and its report.

    Where the two completions have different prompts, `rejected_prompt_input_ids` holds the rejected one's; it is None
    elsewhere, and a stored data set without any such row lacks the column. `ref_chosen_logps` and `ref_rejected_logps`
    are kept. The report of a streaming data set fills as rows pass.

    Raises: ValueError or TypeError naming row, column and remedy for the first row that cannot be trained on. A
    streaming data set is checked on its first rows here, and on the others as they pass.
    """
    rows, report = _prepared(dataset, processing_class, settings, name, PairTokenizer)
    return without_nulls(rows, OWN_PROMPT), report


def prepare_reward_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    settings: RewardPreparation,
    *,
    name: str = "train",
) -> tuple[AnyDataset, PreparationReport]:
    """The data set as rows of whole sequences, `chosen_input_ids` and `rejected_input_ids`, and its report.

    A column `margin` is kept as floats. Raises as `prepare_preference_dataset` does.
    """
    return _prepared(dataset, processing_class, settings, name, RewardTokenizer)


def _prepared(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    settings: RewardPreparation,
    name: str,
    make: "type[PairTokenizer]",
) -> tuple[AnyDataset, PreparationReport]:
    for_reward = make is RewardTokenizer
    row, columns = first_row(dataset, name, "'chosen' and 'rejected'"), column_names(dataset)
    row_type = pair_row_type(columns, row, name=name, for_reward=for_reward)
    reader = PairReader(
        with_eos(processing_class, settings.eos_token), row_type, name, not for_reward, settings.tools
    )
    reader.check(dataset)
    kind = make(
        reader,
        settings.lengths,
        allowed_ids(processing_class, settings.vocab_size, given=row_type.kind == "tokens"),
        settings.add_special_tokens,
        tuple(column for column in make.given_numbers if column in columns),
    )
    return prepare_rows(dataset, kind, settings, name=name)


def without_nulls(dataset: Any, column: str) -> Any:
    """A stored data set without this column if no row has a value in it."""
    is_empty = isinstance(dataset, Dataset) and dataset.data.column(column).null_count == len(dataset.data)
    return dataset.remove_columns(column) if is_empty else dataset


class PairTokens(NamedTuple):
    """A row before truncation: a prompt (empty for reward models) and two completions, and counts."""

    row: int
    prompt: Ids
    chosen: Ids
    rejected: Ids
    own_prompt: Ids | None = None
    counts: Mapping[str, int] = {}


@dataclass(frozen=True)
class PairTokenizer(RowKind):
    """Rows of preferences as `prompt_input_ids`, `chosen_input_ids`, `rejected_input_ids`, cut to `lengths`.

    The completions begin at the first token that the prompt alone does not have, or that the two do not share, so that
    the tokens are those of the whole text. `version` is part of the cache key of the prepared data set.
    """

    counts = (
        *RowKind.counts, "equal_rows", "promptless_rows", "shifted_rows", "removed_begin_tokens", "empty_completions",
        "repeated_prompts",
    )  # fmt: skip
    refused = ("untrained_rows", "promptless_rows")
    columns: ClassVar[tuple[str, ...]] = (*PAIR_COLUMNS, OWN_PROMPT)
    given_numbers: ClassVar[tuple[str, ...]] = REFERENCE_LOGPS

    reader: PairReader
    lengths: PairLengths
    vocabulary: Vocabulary | None = None
    add_special_tokens: bool = True
    kept_numbers: tuple[str, ...] = ()
    version: int = 2

    @property
    def features(self) -> dict[str, Any]:
        ids: dict[str, Any] = dict.fromkeys(self.columns, List(Value("int32")))
        return ids | dict.fromkeys(self.kept_numbers, Value("float32"))

    def __call__(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
        rows, is_given, name = rows_of(batch), self.reader.row_type.kind == "tokens", self.reader.dataset_name
        tokens = self._given(batch, rows, indices) if is_given else self._made(rows, indices)
        finished = [self._finished(row) for row in tokens]
        made = {}
        for column in (*self.features, *self.counts):
            if column in self.kept_numbers:
                places = (self.reader.place(index, column) for index in indices)
                made[column] = [
                    check_number(v, place) for v, place in zip(batch[column], places, strict=True)
                ]
                continue
            made[column] = [row.get(column, 0) for row in finished]
            if column in self.columns and not is_given:  # empty ones are counted
                ids = [row or [0] for row in made[column]]
                given = column.removeprefix("whole_").removesuffix("_input_ids")
                check_ids(ids, self.vocabulary, name, [row.row for row in tokens], given)
        return made

    def _tokenized(self, texts: Sequence[tuple[str, Sequence[str]]]) -> list[Split]:
        """Prompts and the answers to each as tokens."""
        return tokenize_split(
            text_tokenizer(self.reader.processing_class),
            texts,
            add_special_tokens=self.add_special_tokens and self.reader.row_type.kind == "text",
            is_encoder_decoder=self.lengths.is_encoder_decoder,
        )

    def _made(self, rows: list[dict], indices: Sequence[int]) -> list[Any]:
        pairs = [self.reader.read(row, index) for index, row in zip(indices, rows, strict=True)]
        texts = []
        for pair in pairs:
            shared = shared_prompt([pair.chosen[0], pair.rejected[0]])
            texts.append((shared, ["".join(side)[len(shared) :] for side in (pair.chosen, pair.rejected)]))
        # The answers of an implicit prompt may part within a token: nobody chose that boundary.
        chosen_boundary = self.reader.row_type.kind != "text" or self.reader.row_type.has_prompt
        return [
            PairTokens(
                index,
                split.prompt,
                *split.completions,
                counts={
                    "shifted_rows": split.shifted if chosen_boundary else 0,
                    "removed_begin_tokens": split.removed_begin_tokens,
                    "empty_completions": int(not all(answers)),
                    "repeated_prompts": int(pair.is_repeated),
                },
            )
            for index, split, (_, answers), pair in zip(
                indices, self._tokenized(texts), texts, pairs, strict=True
            )
        ]

    def _given(self, batch: dict[str, list], rows: list[dict], indices: Sequence[int]) -> list[Any]:
        row_type = self.reader.row_type
        columns = (*row_type.columns, *(["prompt_input_ids"] if row_type.has_prompt else []))
        for column in columns:
            check_ids(batch[column], self.vocabulary, self.reader.dataset_name, indices, column)
        if row_type.columns == OLDER_REWARD_COLUMNS:
            return [
                PairTokens(
                    index, [], self._unpadded(row, index, SIDES[0]), self._unpadded(row, index, SIDES[1])
                )
                for row, index in zip(rows, indices, strict=True)
            ]
        return [
            PairTokens(
                index,
                list(row["prompt_input_ids"]) if row_type.has_prompt else [],
                list(row["chosen_input_ids"]),
                list(row["rejected_input_ids"]),
                None if row.get(OWN_PROMPT) is None else list(row[OWN_PROMPT]),
            )
            for row, index in zip(rows, indices, strict=True)
        ]

    def _unpadded(self, row: dict[str, Any], index: int, side: str) -> Ids:
        ids, column = row[f"input_ids_{side}"], f"attention_mask_{side}"
        mask = row.get(column)
        if mask is None:
            return list(ids)
        if len(mask) != len(ids) or not any(mask):
            given = f"{len(mask)} values ({sum(map(bool, mask))} not 0) for {len(ids)} tokens in 'input_ids_{side}'"
            remedy = "Give 1 for each token, 0 for padding."
            raise self.reader.place(index, column).error(given, "as many, and at least one that is 1", remedy)
        return [token for token, is_real in zip(ids, mask, strict=True) if is_real]

    def _finished(self, tokens: Any) -> dict[str, Any]:
        own_prompt = tokens.prompt if tokens.own_prompt is None else tokens.own_prompt
        sides = [Side(tokens.prompt, tokens.chosen), Side(own_prompt, tokens.rejected)]
        with self.reader.place(tokens.row, "prompt_input_ids").named():
            if tokens.own_prompt is None:
                cut = self.lengths.cut(tokens.prompt, [tokens.chosen, tokens.rejected])
            else:
                cut = [self.lengths.cut(side.prompt, [side.completion])[0] for side in sides]
        chosen, rejected = cut if self.lengths.is_encoder_decoder else map(with_context, cut)
        own = rejected.prompt if rejected.prompt != chosen.prompt else None
        ids = (chosen.prompt, chosen.completion, rejected.completion, own)
        lost = [(len(a.prompt) - len(b.prompt), len(a.completion) - len(b.completion)) for a, b in zip(sides, cut, strict=True)]  # fmt: skip
        return {
            **dict(zip(self.columns, ids, strict=True)),
            **tokens.counts,
            "row": tokens.row,
            "tokens": sum(len(part) for part in ids if part),
            # Of the prompt, which is counted once, as many as the side that lost more of it.
            "removed_tokens": max(prompt for prompt, _ in lost) + sum(completion for _, completion in lost),
            "untrained_rows": int(not (chosen.completion and rejected.completion)),
            "equal_rows": int(own is None and chosen.completion == rejected.completion),
            "promptless_rows": int(any(not side.prompt for side in cut)),
        }

    def complaint(self, numbers: Mapping[str, int], name: str) -> str:
        place, other = Place(name, numbers["row"], "chosen_input_ids"), "the one in 'rejected_input_ids'"
        if not numbers["untrained_rows"]:
            given = (
                f"no token of the prompt is left before it or {other} (max_length {self.lengths.max_length})"
            )
            remedy = "Raise max_length, lower max_completion_length, or filter the row out."
            return str(place.error(given, "at least one", remedy))
        given = f"truncation to {self.lengths} leaves no token of this completion or of {other}"
        remedy = "Raise max_length, lower max_prompt_length, or filter the row out."
        return str(place.error(given, "at least one of each", remedy))


@dataclass(frozen=True)
class RewardTokenizer(PairTokenizer):
    """Rows as `chosen_input_ids` and `rejected_input_ids`: whole sequences, never cut; longer ones are left out.

    Text ends with one eos; a conversation is what the chat template writes.
    """

    refused = ("untrained_rows",)
    columns = ("chosen_input_ids", "rejected_input_ids")
    given_numbers = ("margin",)
    texts = REWARD_TEXTS

    def _made(self, rows: list[dict], indices: Sequence[int]) -> list[Any]:
        pairs = [self.reader.read(row, index) for index, row in zip(indices, rows, strict=True)]
        texts = [side[1] for pair in pairs for side in (pair.chosen, pair.rejected)]
        tokenizer = text_tokenizer(self.reader.processing_class)
        if self.reader.row_type.kind == "text":
            encoded = encode_closed(tokenizer, texts, add_special_tokens=self.add_special_tokens)
        else:
            encoded = [(ids, 0) for ids in encode(tokenizer, texts)]
        return [
            PairTokens(row, [], chosen, rejected, None, {"removed_begin_tokens": removed, "repeated_prompts": int(pair.is_repeated)})
            for row, pair, (chosen, removed), (rejected, _) in zip(indices, pairs, encoded[::2], encoded[1::2], strict=True)
        ]  # fmt: skip

    def _finished(self, tokens: Any) -> dict[str, Any]:
        own = tokens.prompt if tokens.own_prompt is None else tokens.own_prompt
        chosen, rejected = tokens.prompt + tokens.chosen, own + tokens.rejected
        longest, limit = max(len(chosen), len(rejected)), self.lengths.max_length
        return {
            **tokens.counts,
            "chosen_input_ids": chosen,
            "rejected_input_ids": rejected,
            "row": tokens.row,
            "tokens": len(chosen) + len(rejected),
            "untrained_rows": int(limit is not None and longest > limit),
            "equal_rows": int(chosen == rejected),
        }

    def complaint(self, numbers: Mapping[str, int], name: str) -> str:
        given = f"this sequence or the one in 'rejected_input_ids' has more than max_length {self.lengths.max_length} tokens"
        place = Place(name, numbers["row"], "chosen_input_ids")
        return str(place.error(given, "at most as many", "Raise max_length, or filter the row out."))


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
