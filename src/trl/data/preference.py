"""A data set of paired preferences -> token rows for the pair losses and for reward models, and a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from datasets import Dataset, List, Value
from datasets.features.features import FeatureType

from trl.data.formats import Row, RowDict, StoredOrStream, column_names, common_prefix_length
from trl.data.pipeline import WARNINGS, Preparation, PreparationReport, RowKind, Vocabulary, allowed_ids, check_ids
from trl.data.preference_rows import (
    OLDER_REWARD_COLUMNS,
    PAIR_COLUMNS,
    SIDES,
    PairLengths,
    PairReader,
    Side,
    TruncationMode,
    TruncationOrder,
    pair_row_type,
    with_context,
)
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.data.tokenization import Ids, encode, tokenize_split
from trl.data.validation import check_number
from trl.options.checks import check_one_of

# The prompt of a rejected completion, where truncation (or an empty prompt) gave it another than the chosen one has.
OWN_PROMPT = "rejected_prompt_input_ids"
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


class Answers(NamedTuple):
    """A prompt and its answers as text; whether the prompt's end is the user's choice; further columns."""

    row: int
    prompt: str
    answers: list[str]
    has_boundary: bool
    more: Row


class Tokens(NamedTuple):
    """A prompt and its completions before truncation; the last completion's own prompt, if any; further columns."""

    row: int
    prompt: Ids
    completions: list[Ids]
    own_prompt: Ids | None = None
    more: Mapping[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class PairTokenizer(PairReader, RowKind):
    """Rows of preferences as `prompt_input_ids`, `chosen_input_ids`, `rejected_input_ids`, cut to `lengths`.

    The completions begin at the first token that the prompt alone does not have, or that the two do not share.
    `version` is part of the cache key of the prepared data set.
    """

    counts = (
        *RowKind.counts, "equal_rows", "promptless_rows", "shifted_rows", "removed_begin_tokens", "empty_completions",
        "repeated_prompts", "hidden_answers",
    )  # fmt: skip
    refused = ("untrained_rows", "promptless_rows")
    columns: ClassVar[tuple[str, ...]] = (*PAIR_COLUMNS, OWN_PROMPT)
    given_numbers: ClassVar[tuple[str, ...]] = REFERENCE_COLUMNS

    lengths: PairLengths
    vocabulary: Vocabulary | None = None
    add_special_tokens: bool = True
    kept_numbers: tuple[str, ...] = ()
    version: int = 5

    @property
    def features(self) -> dict[str, FeatureType]:
        ids: dict[str, FeatureType] = dict.fromkeys(self.columns, List(Value("int32")))
        return ids | dict.fromkeys(self.kept_numbers, Value("float32"))

    def rows(self, rows: Sequence[Row], indices: Sequence[int]) -> list[RowDict]:
        rows_by_index = dict(zip(indices, rows, strict=True))
        is_given = self.row_type.kind == "tokens"
        tokens = (
            [self._given(row, index) for index, row in rows_by_index.items()]
            if is_given
            else self._tokenized(rows_by_index)
        )
        cut_rows = [self._cut(row) for row in tokens]
        for row in cut_rows:
            for column in self.columns if self.vocabulary and not is_given else ():
                place = self.place(row["row"], column.removeprefix("whole_").removesuffix("_input_ids"))
                check_ids(row.get(column) or [], self.vocabulary, place, may_be_empty=True)  # empty ones are counted
            for column in self.kept_numbers:
                place = self.place(row["row"], column)
                row[column] = check_number(rows_by_index[row["row"]][column], place)
        return cut_rows

    def _answers(self, row: Row, index: int) -> list[Answers]:
        chosen, rejected, counts = self.read(row, index)
        # Templates may render the prompt in another way in its middle: what both sides share is the prompt.
        shared = chosen[0][: common_prefix_length(chosen[0], rejected[0])]
        answers = ["".join(side)[len(shared) :] for side in (chosen, rejected)]
        # The answers of an implicit prompt may part within a token: nobody chose that boundary.
        has_boundary = self.row_type.is_chat or "prompt" in row
        return [Answers(index, shared, answers, has_boundary, counts)]

    def _tokenized(self, rows: Mapping[int, Row]) -> list[Tokens]:
        read = [texts for index, row in rows.items() for texts in self._answers(row, index)]
        splits = tokenize_split(
            text_tokenizer(self.processing_class),
            [(texts.prompt, texts.answers) for texts in read],
            add_special_tokens=self.add_special_tokens and not self.row_type.is_chat,
            adds_eos=self.needs_prompt or not self.row_type.is_chat,
            is_chat=self.row_type.is_chat,
            is_encoder_decoder=self.lengths.is_encoder_decoder,
        )
        tokens = []
        for texts, split in zip(read, splits, strict=True):
            counts = {
                "shifted_rows": split.shifted * texts.has_boundary,
                "removed_begin_tokens": split.removed_begin_tokens,
                "empty_completions": int(not all(texts.answers)),
            }
            tokens.append(Tokens(texts.row, split.prompt, split.completions, more={**counts, **texts.more}))
        return tokens

    def _check_given(self, row: Row, index: int) -> None:
        for column in (*self.row_type.columns, PAIR_COLUMNS[0]):
            if column in row:
                check_ids(row[column], self.vocabulary, self.place(index, column))

    def _given(self, row: Row, index: int) -> Tokens:
        if self.row_type.columns == OLDER_REWARD_COLUMNS:  # whole sequences, their prompt included
            row = {c: value for c, value in row.items() if c not in (PAIR_COLUMNS[0], OWN_PROMPT)}
        self._check_given(row, index)
        completions = [list(row[column]) for column in self.row_type.columns[-2:]]
        return Tokens(index, list(row.get(PAIR_COLUMNS[0]) or []), completions, row.get(OWN_PROMPT))

    def _cut(self, tokens: Tokens) -> RowDict:
        rejected_prompt = tokens.prompt if tokens.own_prompt is None else tokens.own_prompt
        sides = list(map(Side, (tokens.prompt, rejected_prompt), tokens.completions))
        with self.place(tokens.row, PAIR_COLUMNS[0]).named():
            if tokens.own_prompt is None:
                cut = self.lengths.cut(tokens.prompt, tokens.completions)
            else:
                cut = [self.lengths.cut(side.prompt, [side.completion])[0] for side in sides]
        chosen, rejected = cut if self.lengths.is_encoder_decoder else map(with_context, cut)
        rejected_prompt = rejected.prompt if rejected.prompt != chosen.prompt else None
        ids = (chosen.prompt, chosen.completion, rejected.completion, rejected_prompt)
        lost = [[len(a) - len(b) for a, b in zip(*pair, strict=True)] for pair in zip(sides, cut, strict=True)]
        return {
            **dict(zip(self.columns, ids, strict=True)),
            **tokens.more,
            "row": tokens.row,
            "tokens": sum(len(part) for part in ids if part),
            # Of the prompt, which is counted once, as many as the side that lost more of it.
            "removed_tokens": max(prompt for prompt, _ in lost) + sum(completion for _, completion in lost),
            "untrained_rows": int(not (chosen.completion and rejected.completion)),
            "equal_rows": int(rejected_prompt is None and chosen.completion == rejected.completion),
            "promptless_rows": int(any(not side.prompt for side in cut)),
        }

    def complaint(self, numbers: Mapping[str, int]) -> tuple[str, str, str, str]:
        what = "one of the two completions" if numbers["untrained_rows"] else "the prompt before one of them"
        remedy = "Raise max_length, lower max_prompt_length or max_completion_length, or filter the row out."
        fault = f"truncation (max_length {self.lengths.max_length}) leaves no token of {what}"
        return "chosen_input_ids", fault, "at least one", remedy


@dataclass(frozen=True, kw_only=True)
class RewardTokenizer(PairTokenizer):
    """Rows as `chosen_input_ids` and `rejected_input_ids`: whole sequences, never cut; longer ones are left out.

    Text ends with one eos; a conversation is what the chat template writes.
    """

    refused = ("untrained_rows",)
    columns = ("chosen_input_ids", "rejected_input_ids")
    given_numbers = ("margin",)
    warnings: ClassVar[Mapping[str, str]] = {
        **WARNINGS,
        "untrained_rows": "a sequence has more than max_length tokens{}. Raise max_length to train on them.",
    }

    needs_prompt: bool = False

    def _cut(self, tokens: Tokens) -> RowDict:
        rejected_prompt = tokens.prompt if tokens.own_prompt is None else tokens.own_prompt
        chosen, rejected = tokens.prompt + tokens.completions[0], rejected_prompt + tokens.completions[1]
        longest, limit = max(len(chosen), len(rejected)), self.lengths.max_length
        return {
            **tokens.more,
            "chosen_input_ids": chosen,
            "rejected_input_ids": rejected,
            "row": tokens.row,
            "tokens": len(chosen) + len(rejected),
            "untrained_rows": int(limit is not None and longest > limit),
            "equal_rows": int(chosen == rejected),
        }

    def complaint(self, numbers: Mapping[str, int]) -> tuple[str, str, str, str]:
        limit = f"max_length {self.lengths.max_length} tokens"
        fault = f"this sequence or the one in 'rejected_input_ids' has more than {limit}"
        return "chosen_input_ids", fault, "at most as many", "Raise max_length, or filter the row out."


@dataclass(frozen=True, kw_only=True)
class RewardPreparation(Preparation):
    """How rows of preferences become whole sequences; longer ones than `max_length` are dropped, or an error.

    `tools` replace the rows' own column `tools`. A column `margin` is kept as floats.
    """

    tools: list | None = None
    untrained_rows: Literal["drop", "error"] = "drop"
    policies = ("drop", "error")

    sequences = tuple((f"{side}_input_ids",) for side in SIDES)
    takes = "'chosen' and 'rejected'"
    tokenizer: ClassVar[type[PairTokenizer]] = RewardTokenizer

    @property
    def lengths(self) -> PairLengths:
        names = [item.name for item in fields(PairLengths) if hasattr(self, item.name)]
        return PairLengths(**{name: getattr(self, name) for name in names})

    def row_kind(
        self, dataset: StoredOrStream, row: Row, processing_class: ProcessingClass, name: str
    ) -> PairTokenizer:
        columns, make = column_names(dataset), self.tokenizer
        row_type = pair_row_type(columns, row, name=name, for_reward=make is RewardTokenizer)
        kind = make(
            processing_class=processing_class, row_type=row_type, dataset_name=name, tools=self.tools,
            lengths=self.lengths, add_special_tokens=self.add_special_tokens,
            vocabulary=allowed_ids(processing_class, self.vocab_size, is_tokenized=row_type.kind == "tokens"),
            kept_numbers=tuple(column for column in make.given_numbers if column in columns),
        )  # fmt: skip
        kind.check(dataset)
        return kind


@dataclass(frozen=True, kw_only=True)
class PreferencePreparation(RewardPreparation, PairLengths):
    """How rows of preferences become prompts and completions; for the lengths see `PairLengths`.

    Rows that lose a whole completion to truncation are dropped, or an error; "error" also refuses rows that lose their
    whole prompt, which "drop" counts. Where the two completions have different prompts, `rejected_prompt_input_ids`
    holds the rejected one's; a stored data set without any lacks the column. Reference log-probs are kept.
    """

    sequences = tuple((PAIR_COLUMNS[0], completion) for completion in PAIR_COLUMNS[1:])
    tokenizer = PairTokenizer
    other_prompts = OWN_PROMPT

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("truncation_mode", self.truncation_mode, get_args(TruncationMode))
        check_one_of("truncation_order", self.truncation_order, get_args(TruncationOrder))

    def finished(self, rows: StoredOrStream, kind: Any, report: PreparationReport) -> StoredOrStream:
        """Stored rows without the column of other prompts if none has one."""
        column = str(self.other_prompts)
        if isinstance(rows, Dataset) and rows.data.column(column).null_count == len(rows.data):
            return rows.remove_columns(column)
        return rows


def tokenize_preference_row(
    features: Mapping[str, str], processing_class: ProcessingClass, max_prompt_length: int | None = None,
    max_completion_length: int | None = None, add_special_tokens: bool = True,
) -> dict[str, list[int]]:  # fmt: skip
    """One row of text as token ids, as the 0.26 trainers' `tokenize_row` gives them: every part tokenised by itself.

    `features` holds `prompt`, `chosen` and `rejected`. The completions get an eos and keep their first
    `max_completion_length` tokens, the prompt keeps its last `max_prompt_length`; with `add_special_tokens` (for
    encoder-decoders) it stands between a begin token, where the tokenizer has one, and an eos. Training tokenises
    prompt and completion together. Raises: ValueError where the tokenizer has no eos token.
    """
    tokenizer = text_tokenizer(processing_class)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token to close completions. Set tokenizer.eos_token.")
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
