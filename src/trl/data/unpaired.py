"""A data set of unpaired preferences (or of pairs) -> token rows for KTO and BCO, and a report."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from trl.data.formats import column_names, is_conversational, maybe_convert_to_chatml
from trl.data.pipeline import (
    TEXTS,
    AnyDataset,
    PreparationReport,
    RowKind,
    Text,
    Texts,
    Vocabulary,
    allowed_ids,
    check_ids,
    first_row,
    prepare_rows,
)
from trl.data.preference_lengths import Ids, PairLengths, Side, TruncationMode, with_context
from trl.data.preference_rows import NOT_ANSWERING, SIDES, PairReader, pair_row_type
from trl.data.rendering import ProcessingClass, split_rendering, text_tokenizer
from trl.data.tokenization import read_chat, read_text, rows_of, tokenize_split
from trl.data.validation import (
    Place,
    check_answer,
    check_chat_template,
    check_eos,
    check_label,
    check_number,
    warn_of_unread_tools,
    wrong_columns,
)

logger = logging.getLogger(__name__)

BATCH = 1000
BALANCED = (1.0, 4 / 3)  # of weight x rows, desirable over undesirable
TOKEN_COLUMNS = ("prompt_input_ids", "completion_input_ids")
KL_COLUMNS = ("KL_completion_input_ids", "KL_prompt_input_ids")
EMBEDDING_COLUMN = "embedding_input_ids"
REFERENCE_LOGPS = ("reference_logps", "reference_KL_logps")
MARKS = 2  # places that are kept for a begin token and an eos
NO_MODEL_LIMIT = 10**9  # tokenizers without a length of their own have a larger one

UNPAIRED_TEXTS: Texts = {
    "desirable_rows": Text("{0.desirable_rows} desirable"),
    **TEXTS,
    "untrained_rows": Text(
        "{0.untrained_rows} with the completion cut off whole",
        "in {0.untrained_rows} of {0.rows} rows (first: {0.first[untrained_rows]}) truncation left no token of the completion; "
        "{0.dropped_rows} of them were left out. Raise max_length, lower max_prompt_length, or filter these rows.",
    ),
    "equal_rows": Text(
        "{0.equal_rows} of pairs with equal completions",
        "in {0.equal_rows} rows of pairs (first pairs: {0.first[equal_rows]}) the undesirable completion is the desirable one "
        "too, so the two teach nothing. Filter these pairs, or raise the lengths if truncation made them equal.",
    ),
    "promptless_rows": Text(
        "{0.promptless_rows} with no prompt",
        "in {0.promptless_rows} of {0.rows} rows (first: {0.first[promptless_rows]}) there is no token of a prompt, and the "
        "completion's first token is not trained. Give prompts, or a tokenizer that adds a begin token.",
    ),
    "empty_completions": Text(
        "{0.empty_completions} with a completion of the eos token alone",
        "in {0.empty_completions} of {0.rows} rows (first: {0.first[empty_completions]}) one answer of a pair is what the "
        "other one continues; its completion is the eos token alone. Give the prompts in a column 'prompt' if that is "
        "not meant.",
    ),
}


@dataclass(frozen=True)
class UnpairedPreparation:
    """How rows of prompt, completion and label become token rows; lengths in tokens, None for no limit.

    - A prompt is cut only where it and its completion exceed `max_length`: to its last ("keep_end") or first
      `max_prompt_length` tokens. If that is not enough, the completion keeps its first `max_length - max_prompt_length`,
      and its eos. `max_completion_length` acts on encoder-decoders only.
    - `mismatch_group`: for KTO's KL estimate, the rows among which completions are exchanged, which are those of one
      batch: `per_device_train_batch_size`. None: no such column.
    - `weights`: KTO's desirable_weight and undesirable_weight, compared with the numbers of rows; None: not compared.
    - `embedding_tokenizer`: BCO's; adds `embedding_input_ids`, the prompts under it.
    - `untrained_rows`: rows of which truncation takes the whole completion are left out and counted, or an error.

    Raises: ValueError for lengths below 1, for `max_length` below 3, and for a group of one row.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: TruncationMode = "keep_end"
    is_encoder_decoder: bool = False
    mismatch_group: int | None = None
    weights: tuple[float, float] | None = None
    embedding_tokenizer: PreTrainedTokenizerBase | None = None
    add_special_tokens: bool = True
    num_proc: int | None = None
    vocab_size: int | None = None
    untrained_rows: Literal["drop", "error"] = "drop"

    def __post_init__(self) -> None:
        if self.untrained_rows not in ("drop", "error"):
            raise ValueError(f"untrained_rows must be 'drop' or 'error', got {self.untrained_rows!r}. Choose one.")  # fmt: skip
        if self.mismatch_group is not None and self.mismatch_group < 2:
            raise ValueError(
                f"per_device_train_batch_size must be at least 2 for loss_type='kto', got {self.mismatch_group}: the KL "
                "estimate needs another row's completion from the same batch. Raise it (at least 4 is advised) and lower "
                "gradient_accumulation_steps, or use loss_type='apo_zero_unpaired'."
            )
        _ = self.limits  # whose constructor checks them
        if self.max_length is not None and self.max_length < 3:
            raise ValueError(f"max_length must be >= 3, got {self.max_length}. A begin token, a token to train on and an eos need that.")  # fmt: skip

    @property
    def limits(self) -> PairLengths:
        """The limits of prompt and completion."""
        return PairLengths(
            self.max_length,
            self.max_prompt_length,
            self.max_completion_length,
            self.truncation_mode,
            "prompt_first",
            self.is_encoder_decoder,
        )


def prepare_unpaired_dataset(
    dataset: AnyDataset,
    processing_class: ProcessingClass,
    settings: UnpairedPreparation,
    *,
    name: str = "train",
) -> tuple[AnyDataset, PreparationReport]:
    """The data set as rows of `prompt_input_ids`, `completion_input_ids` and `label`, and its report.

    Pairs are taken apart: each chosen completion (label true) is followed by the rejected one (label false). With
    `mismatch_group`, `KL_completion_input_ids` is the completion of the row before it in its group (groups are counted
    from the first row; of pairs, the row before it with the same label, which is of another pair), cut behind this row's
    prompt; `KL_prompt_input_ids` is that prompt where its length took more or less of it than of `prompt_input_ids`, None
    elsewhere; a stored data set without any such row lacks the column. `reference_logps` and `reference_KL_logps` are
    kept. The report of a stream fills as rows pass.

    Raises: ValueError or TypeError naming row, column and remedy for the first row that cannot be trained on. A stream
    is checked on its first rows here, and on the others as they pass.
    """
    row = first_row(dataset, name, "'prompt', 'completion' and 'label'")
    reader, columns = _reader(dataset, row, processing_class, settings, name), column_names(dataset)
    is_given = reader.kind == "tokens"
    report = PreparationReport(name, texts=UNPAIRED_TEXTS)
    group = None if is_given and KL_COLUMNS[0] in columns else settings.mismatch_group
    tokenizer = text_tokenizer(processing_class)
    lengths = CompletionLengths(settings.limits, tokenizer.bos_token_id, tokenizer.eos_token_id)  # type: ignore[arg-type]
    kind = UnpairedTokenizer(
        reader,
        lengths,
        settings.add_special_tokens,
        allowed_ids(processing_class, settings.vocab_size, given=is_given),
        None if is_given else settings.embedding_tokenizer,
        keep_whole=group is not None,
        kept_numbers=tuple(
            column for column in REFERENCE_LOGPS if column in columns and reader.pairs is None
        ),
    )
    rows: Any = prepare_rows(
        dataset,
        kind,
        report,
        policy=settings.untrained_rows,
        num_proc=settings.num_proc,
        keep_columns=(*KL_COLUMNS, EMBEDDING_COLUMN) if is_given else (),
    )
    if isinstance(rows, Dataset):
        _warn_of_balance(report, settings)
    if group is not None:
        is_paired = reader.pairs is not None
        if is_paired and group < 4:
            logger.warning(
                "%s dataset: an optimiser step of %d rows holds too few pairs for the KL estimate, which then reads the other "
                "completion of the same pair. Raise per_device_train_batch_size, to at least 4 rows per step.",
                name,
                group,
            )
        rows = _with_mismatches(rows, Mismatching(lengths, group, same_label=is_paired), name)
    return rows, report  # type: ignore[return-value]


def _reader(
    dataset: Any,
    row: Mapping[str, Any],
    processing_class: ProcessingClass,
    settings: UnpairedPreparation,
    name: str,
) -> "UnpairedReader":
    """The reader of this data set's rows, after checks of columns, tokenizer and template."""
    columns = column_names(dataset)
    if set(TOKEN_COLUMNS) <= set(columns):
        needed = ("label", *([EMBEDDING_COLUMN] if settings.embedding_tokenizer is not None else []))
        if not set(needed) <= set(columns):
            takes = f"'label' (true where the completion is desirable), and for BCO's embedding_tokenizer {EMBEDDING_COLUMN!r}"
            raise wrong_columns(columns, name, takes=takes, needed=needed)
        return UnpairedReader(processing_class, "tokens", name)
    pairs, kind, column = None, "text", "completion"
    if set(SIDES) <= set(columns):
        row_type = pair_row_type(columns, row, name=name)
        pairs, kind, column = PairReader(processing_class, row_type, name), row_type.kind, SIDES[0]
    else:
        if not {"prompt", "completion", "label"} <= set(columns):
            takes = "'prompt', 'completion' and 'label', pairs, or tokenized 'prompt_input_ids', 'completion_input_ids' and 'label'"
            raise wrong_columns(columns, name, takes=takes, needed=("prompt", "completion", "label"))
        turns = maybe_convert_to_chatml(dict(row))
        if is_conversational({key: turns.get(key) for key in ("prompt", "completion")}):
            kind = "messages"
    place = Place(name, 0, column)
    if kind == "messages":
        check_chat_template(processing_class, place)
        warn_of_unread_tools(dataset, processing_class, name=name)
    check_eos(processing_class, place, remedy="Set tokenizer.eos_token to a token of its vocabulary.")
    return UnpairedReader(processing_class, kind, name, pairs)


class Sample(NamedTuple):
    """One completion behind its prompt, as text, and the row that it comes from."""

    prompt: str
    completion: str
    label: bool
    row: int


class Tokens(NamedTuple):
    """One completion behind its prompt before truncation, and counts."""

    prompt: Ids
    completion: Ids
    label: bool
    row: int
    counts: Mapping[str, int] = {}


@dataclass(frozen=True)
class UnpairedReader:
    """Reads prompt, completion and label of rows of one format, checked; of pairs two of each.

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
            pair = self.pairs.read(row, index)
            return [Sample(*pair.chosen, True, index), Sample(*pair.rejected, False, index)]
        label, place = (
            check_label(row.get("label"), self.place(index, "label")),
            self.place(index, "completion"),
        )
        if self.kind == "text":
            prompt = read_text(self.processing_class, row, self.place(index, "prompt"), may_be_empty=True)
            return [Sample(prompt, read_text(self.processing_class, row, place), label, index)]
        chat = read_chat(self.processing_class, row, self.place(index, "prompt"))
        answer = read_chat(self.processing_class, row, place).messages
        role = answer[0]["role"]
        if role in NOT_ANSWERING:
            remedy = "Give the answer only, and put what comes before it into the prompt."
            raise place._replace(message=0).error(
                f"role {role!r}", "the assistant's answer to 'prompt'", remedy
            )
        check_answer(answer, place)
        with place.named():
            return [Sample(*split_rendering(self.processing_class, chat, answer), label, index)]


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


@dataclass(frozen=True)
class UnpairedTokenizer(RowKind):
    """Rows of a prompt, a completion and a label, cut to `lengths`; a pair becomes two rows.

    The completion begins at the first token that the prompt alone does not have. `keep_whole` adds what a row was before
    it was cut, for the mismatched completions. `version` is part of the cache key of the prepared data set.
    """

    counts = (
        *RowKind.counts, "desirable_rows", "undesirable_rows", "equal_rows", "promptless_rows", "shifted_rows",
        "removed_begin_tokens", "empty_completions",
    )  # fmt: skip

    reader: UnpairedReader
    lengths: CompletionLengths
    add_special_tokens: bool = True
    vocabulary: Vocabulary | None = None
    embedding_tokenizer: PreTrainedTokenizerBase | None = None
    keep_whole: bool = False
    kept_numbers: tuple[str, ...] = ()
    version: int = 3

    @property
    def features(self) -> dict[str, Any]:
        ids = List(Value("int32"))
        made: dict[str, Any] = {**dict.fromkeys(TOKEN_COLUMNS, ids), "label": Value("bool")}
        made |= dict.fromkeys(WHOLE, ids) if self.keep_whole else {}
        made |= {EMBEDDING_COLUMN: ids} if self.embedding_tokenizer is not None else {}
        return made | dict.fromkeys(self.kept_numbers, Value("float64"))

    def __call__(self, batch: dict[str, list], indices: Sequence[int]) -> dict[str, list]:
        rows, embedded = rows_of(batch), {}
        if self.reader.kind == "tokens":
            tokens = self._given(batch, rows, indices)
        else:
            samples = [
                s for index, row in zip(indices, rows, strict=True) for s in self.reader.samples(row, index)
            ]
            tokens, embedded = self._tokenized(samples), self._embedded(samples)
        finished = [self._finished(row) for row in tokens]
        if self.reader.pairs is not None:  # mark rejected completions that are what the chosen one is
            for chosen, rejected in zip(finished[::2], finished[1::2], strict=True):
                rejected["equal_rows"] = int(all(rejected[name] == chosen[name] for name in TOKEN_COLUMNS))
        numbers = {
            name: [
                check_number(v, self.reader.place(i, name)) for i, v in zip(indices, batch[name], strict=True)
            ]
            for name in self.kept_numbers
        }
        made = {name: [row.get(name, 0) for row in finished] for name in (*finished[0], *self.counts)}
        return {**made, **embedded, **numbers}

    def _tokenized(self, samples: Sequence[Sample]) -> list[Tokens]:
        splits = tokenize_split(
            text_tokenizer(self.reader.processing_class),
            [(sample.prompt, [sample.completion]) for sample in samples],
            add_special_tokens=self.add_special_tokens and self.reader.kind == "text",
            is_encoder_decoder=self.lengths.limits.is_encoder_decoder,
        )
        rows = [sample.row for sample in samples]
        for column, ids in (
            ("prompt", [split.prompt or [0] for split in splits]),
            ("completion", [split.completions[0] or [0] for split in splits]),
        ):
            check_ids(ids, self.vocabulary, self.reader.dataset_name, rows, column)
        return [
            Tokens(
                split.prompt,
                split.completions[0],
                sample.label,
                sample.row,
                {
                    "shifted_rows": split.shifted,
                    "removed_begin_tokens": split.removed_begin_tokens,
                    "empty_completions": int(not sample.completion),
                },
            )
            for split, sample in zip(splits, samples, strict=True)
        ]

    def _embedded(self, samples: Sequence[Sample]) -> dict[str, list[Ids]]:
        """The prompts under the tokenizer of the embedding model, cut to its length."""
        tokenizer = self.embedding_tokenizer
        if tokenizer is None:
            return {}
        texts = list(dict.fromkeys(sample.prompt for sample in samples))
        truncation = tokenizer.model_max_length < NO_MODEL_LIMIT
        encoded = tokenizer(texts, truncation=truncation, verbose=False)["input_ids"]
        ids = dict(zip(texts, encoded, strict=True))  # type: ignore[arg-type]
        return {EMBEDDING_COLUMN: [ids[sample.prompt] for sample in samples]}

    def _given(self, batch: dict[str, list], rows: list[dict], indices: Sequence[int]) -> list[Tokens]:
        for column in (name for name in (*TOKEN_COLUMNS, KL_COLUMNS[0]) if name in batch):
            check_ids(batch[column], self.vocabulary, self.reader.dataset_name, indices, column)
        found = []
        for index, row in zip(indices, rows, strict=True):
            label = check_label(row["label"], self.reader.place(index, "label"))
            found.append(
                Tokens(list(row["prompt_input_ids"]), list(row["completion_input_ids"]), label, index)
            )
        return found

    def _finished(self, tokens: Tokens) -> dict[str, Any]:
        with self.reader.place(tokens.row, TOKEN_COLUMNS[0]).named():
            cut = self.lengths.cut(tokens.prompt, tokens.completion)
        removed = len(tokens.prompt) + len(tokens.completion) - len(cut.prompt) - len(cut.completion)
        side = cut if self.lengths.limits.is_encoder_decoder else with_context(cut)
        is_lost = removed > 0 and cut.completion in ([], [self.lengths.eos])
        is_untrained = not side.completion or is_lost
        whole = (tokens.prompt, tokens.completion) if removed else (None, None)
        return {
            **dict(zip(TOKEN_COLUMNS, side, strict=True)),
            "label": tokens.label,
            **(dict(zip(WHOLE, whole, strict=True)) if self.keep_whole else {}),
            **tokens.counts,
            "row": tokens.row,
            "tokens": len(side.prompt) + len(side.completion),
            "removed_tokens": removed,
            "untrained_rows": int(is_untrained),
            "desirable_rows": int(tokens.label and not is_untrained),
            "undesirable_rows": int(not tokens.label and not is_untrained),
            "promptless_rows": int(not cut.prompt),
        }

    def complaint(self, numbers: Mapping[str, int], name: str) -> str:
        limit = self.lengths.limits.max_length
        given = f"the prompt fills max_length {limit}, so truncation leaves no token of the completion"
        remedy = "Set or lower max_prompt_length, raise max_length, or filter the row out."
        return str(Place(name, numbers["row"], TOKEN_COLUMNS[1]).error(given, "at least one", remedy))


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


def _with_mismatches(dataset: Any, mismatch: Mismatching, name: str) -> Any:
    stored = isinstance(dataset, Dataset)
    features = None
    if dataset.features is not None:
        kept = {column: kind for column, kind in dataset.features.items() if column not in WHOLE}
        features = Features({**kept, **dict.fromkeys(KL_COLUMNS, List(Value("int32")))})
    if stored and len(dataset) % mismatch.group == 1:
        logger.warning(
            "%s dataset: the last row is alone in its batch of %d, so its own completion stands in for a mismatched one. "
            "Add or remove a row.",
            name,
            mismatch.group,
        )
    rows = dataset.map(
        mismatch,
        batched=True,
        batch_size=-(-BATCH // mismatch.group) * mismatch.group,
        remove_columns=list(WHOLE),
        features=features,
        **({"desc": f"Mismatching {name} dataset"} if stored else {}),
    )
    own = KL_COLUMNS[1]
    if stored and rows.data.column(own).null_count == len(rows):
        return rows.remove_columns(own)
    return rows


def _warn_of_balance(report: PreparationReport, settings: UnpairedPreparation) -> None:
    """Say where rows of one kind only are trained on, or where the weights do not make up for their numbers."""
    name, good, bad = report.dataset_name, report.desirable_rows, report.undesirable_rows
    if not good or not bad:
        kind = "undesirable (label false)" if bad else "desirable (label true)"
        advice = " With these alone, keep the learning rate low." if bad else ""
        logger.warning("%s dataset: all %d rows are %s. That can be trained on, but both kinds teach more.%s", name, good + bad, kind, advice)  # fmt: skip
        return
    if settings.weights is None:
        return
    weight, counterweight = settings.weights
    low, high = (bound * bad / good for bound in BALANCED)
    if (
        weight * good >= BALANCED[0] * counterweight * bad
        and weight * good <= BALANCED[1] * counterweight * bad
    ):
        return
    logger.warning(
        "%s dataset: %d desirable rows of weight %g and %d undesirable ones of weight %g; desirable_weight x rows over "
        "undesirable_weight x rows should be 1 to 4/3 (KTO, arXiv:2402.01306). Set desirable_weight to %.4g to %.4g, or "
        "undesirable_weight to %.4g to %.4g.",
        name, good, weight, bad, counterweight, low * counterweight, high * counterweight, weight / high, weight / low,
    )  # fmt: skip
