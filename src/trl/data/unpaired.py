"""A data set of unpaired preferences (or of pairs) -> token rows for KTO and BCO, and a report."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, Features, List, Value
from datasets.features.features import FeatureType
from transformers import PreTrainedTokenizerBase

from trl.data.formats import Row, RowDict, StoredOrStream, column_names, is_conversational, maybe_convert_to_chatml
from trl.data.pipeline import PreparationReport, allowed_ids
from trl.data.preference import Answers, PairTokenizer, PreferencePreparation, Tokens
from trl.data.preference_rows import (
    SIDES,
    PairLengths,
    Side,
    TruncationOrder,
    check_no_labels,
    check_role,
    pair_row_type,
    with_context,
)
from trl.data.rendering import ProcessingClass, split_rendering, text_tokenizer
from trl.data.tokenization import Ids
from trl.data.validation import RowType, check_answer, check_label, wrong_columns

logger = logging.getLogger(__name__)

BATCH = 1000
BALANCED = (1.0, 4 / 3)  # of weight x rows, desirable over undesirable
TOKEN_COLUMNS = ("prompt_input_ids", "completion_input_ids")
WHOLE = ("whole_prompt", "whole_completion")
KL_COLUMNS = ("KL_completion_input_ids", "KL_prompt_input_ids")
EMBEDDING_COLUMN = "embedding_input_ids"
REFERENCE_LOGPS = ("reference_logps", "reference_KL_logps")
MARKS = 2  # places that are kept for a begin token and an eos
NO_MODEL_LIMIT = 10**9  # tokenizers without a length of their own have a larger one


@dataclass(frozen=True, kw_only=True)
class UnpairedPreparation(PreferencePreparation):
    """How rows of prompt, completion and label become token rows.

    - Lengths are those of `PairLengths` in the order "prompt_first", for one completion, which keeps its eos.
    - Pairs are taken apart: each chosen completion (label true) is followed by the rejected one (label false).
    - `mismatch_group`: for KTO's KL estimate, the rows of one optimiser step, among which completions are exchanged
      (None: no such columns). `KL_completion_input_ids` is the completion of the row before it in its group (of pairs,
      of the one with the same label), cut behind this row's prompt; `KL_prompt_input_ids` is that prompt where its
      length took more or less of it than of `prompt_input_ids`, None elsewhere, and absent where no stored row has one.
    - `label_weights`: KTO's desirable_weight and undesirable_weight, compared with the numbers of rows.
    - `embedding_tokenizer`: BCO's; adds `embedding_input_ids`, the prompts under it.
    - `reference_logps` and `reference_KL_logps` are kept.

    Raises: ValueError for `max_length` below 3, for a group of one row, and as `PreferencePreparation`.
    """

    takes = "'prompt', 'completion' and 'label'"
    truncation_order: TruncationOrder = "prompt_first"
    mismatch_group: int | None = None
    label_weights: tuple[float, float] | None = None
    embedding_tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def sequences(self) -> tuple[tuple[str, ...], ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        completions = TOKEN_COLUMNS[1:] if self.mismatch_group is None else (TOKEN_COLUMNS[1], KL_COLUMNS[0])
        return tuple((TOKEN_COLUMNS[0], completion) for completion in completions)

    @property
    def other_prompts(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.mismatch_group is None else KL_COLUMNS[1]

    @property
    def prepared_columns(self) -> tuple[str, ...]:
        return (*super().prepared_columns, "label")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mismatch_group is not None and self.mismatch_group < 2:
            fault = f"per_device_train_batch_size must be at least 2 for loss_type='kto', got {self.mismatch_group}"
            remedy = "Raise it, or use loss_type='apo_zero_unpaired'"
            raise ValueError(f"{fault}: the KL estimate needs other rows. {remedy}.")
        if self.max_length is not None and self.max_length < 3:
            raise ValueError(f"max_length must be >= 3 (begin, one token, eos), got {self.max_length}.")

    def row_kind(
        self, dataset: StoredOrStream, row: Row, processing_class: ProcessingClass, name: str
    ) -> "UnpairedTokenizer":
        columns = column_names(dataset)
        row_type = _row_type(columns, row, self, name)
        is_given, is_paired = row_type.kind == "tokens", row_type.columns == SIDES
        group = None if is_given and KL_COLUMNS[0] in columns else self.mismatch_group
        tokenizer: Any = text_tokenizer(processing_class)
        ends = {"begin": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
        kind = UnpairedTokenizer(
            processing_class=processing_class, row_type=row_type, dataset_name=name, tools=self.tools,
            lengths=CompletionLengths(**vars(self.lengths), **ends), add_special_tokens=self.add_special_tokens,
            vocabulary=allowed_ids(processing_class, self.vocab_size, is_tokenized=is_given),
            kept_numbers=() if is_paired else tuple(column for column in REFERENCE_LOGPS if column in columns),
            embedding_tokenizer=None if is_given else self.embedding_tokenizer, keep_whole=group is not None,
            kept_ids=tuple(c for c in (*KL_COLUMNS, EMBEDDING_COLUMN) if is_given and c in columns),
        )  # fmt: skip
        kind.check(dataset)
        return kind

    def finished(self, rows: StoredOrStream, kind: "UnpairedTokenizer", report: PreparationReport) -> StoredOrStream:
        """With the mismatched completions."""
        if isinstance(rows, Dataset):
            _warn_of_balance(report, self)
        group, is_paired, name = self.mismatch_group, kind.row_type.columns == SIDES, report.dataset_name
        if group is None or not kind.keep_whole:
            return rows
        if is_paired and group < 4:
            text = "%s dataset: steps of %d rows have too few pairs to estimate KL. Raise per_device_train_batch_size."
            logger.warning(text, name, group)
        if isinstance(rows, Dataset) and len(rows) % group == 1:
            text = "%s dataset: the last row is alone in its step of %d rows: its KL estimate uses its own completion."
            logger.warning(text, name, group)
        features = None
        if rows.features is not None:
            kept = {column: kind for column, kind in rows.features.items() if column not in WHOLE}
            features = Features({**kept, **dict.fromkeys(KL_COLUMNS, List(Value("int32")))})
        rows = rows.map(
            Mismatching(kind.lengths, group, same_label=is_paired), batched=True, batch_size=-(-BATCH // group) * group,
            remove_columns=list(WHOLE), features=features,
        )  # fmt: skip
        return super().finished(rows, kind, report)


def _row_type(columns: Sequence[str], row: Row, settings: UnpairedPreparation, name: str) -> RowType:
    """The type of rows: tokens, pairs, messages or text, in this order. Raises: ValueError for other columns."""
    if set(TOKEN_COLUMNS) <= set(columns):
        check_no_labels(columns, "completion_labels", name)
        needed = ("label", *([EMBEDDING_COLUMN] if settings.embedding_tokenizer is not None else []))
        if not set(needed) <= set(columns):
            takes = "'label' (true where the completion is desirable), and for BCO's embedding_tokenizer"
            raise wrong_columns(columns, name, takes=f"{takes} {EMBEDDING_COLUMN!r}", needed=needed)
        return RowType("tokens", TOKEN_COLUMNS)
    if set(SIDES) <= set(columns):
        return pair_row_type(columns, row, name=name)
    if not {"prompt", "completion", "label"} <= set(columns):
        takes = "'prompt', 'completion' and 'label', pairs, or tokenized 'prompt_input_ids', 'completion_input_ids'"
        needed = ("prompt", "completion", "label")
        raise wrong_columns(columns, name, takes=f"{takes} and 'label'", needed=needed)
    turns = maybe_convert_to_chatml(dict(row))
    is_chat = is_conversational({key: turns.get(key) for key in ("prompt", "completion")})
    return RowType("messages" if is_chat else "text", ("completion",))


@dataclass(frozen=True)
class CompletionLengths(PairLengths):
    """`PairLengths` for one completion: it keeps its eos, the prompt its begin token (places count without them)."""

    begin: int | None = None
    eos: int | None = None

    def cut(self, prompt: Ids, completions: list[Ids]) -> list[Side]:
        """The prompt and the completion, cut; of the completion nothing but its eos may be left.

        >>> lengths = CompletionLengths(7, 2, truncation_order="prompt_first", begin=1, eos=2)
        >>> lengths.cut([1, 5, 6, 7], [[8, 9, 9, 9, 2]])
        [Side(prompt=[1, 6, 7], completion=[8, 9, 9, 2])]
        """
        (completion,) = completions
        if completion[-2:-1] == [self.eos]:
            # A chat template's newline behind its stop token, which only whole rows keep.
            (side,) = self.cut(prompt, [completion[:-1]])
            tokens = len(side.prompt) + len(side.completion) + 1
            fits = self.max_length is None or tokens <= self.max_length
            is_whole = fits and tokens == len(prompt) + len(completion)
            return [Side(side.prompt, completion) if is_whole else side]
        ending = completion[-1:] if completion[-1:] == [self.eos] else []
        if self.is_encoder_decoder:
            (side,) = super().cut(prompt, completions)
            is_whole = len(side.completion) == len(completion) or not ending
            return [side if is_whole else side._replace(completion=[*side.completion[:-1], *ending])]
        beginning = prompt[:1] if prompt[:1] == [self.begin] else []
        content = completion[: len(completion) - len(ending)]
        length = self.max_length
        limits = self if length is None else replace(self, max_length=length - MARKS)
        (side,) = super(CompletionLengths, limits).cut(prompt[len(beginning) :], [content])
        return [Side([*beginning, *side.prompt], [*side.completion, *ending])]


@dataclass(frozen=True, kw_only=True)
class UnpairedTokenizer(PairTokenizer):
    """Rows of a prompt, a completion and a label, cut to `lengths`; a pair becomes two rows, chosen before rejected.

    `keep_whole` adds uncut rows, for the mismatched completions.
    """

    counts = (*PairTokenizer.counts, "desirable_rows", "undesirable_rows")
    refused = ("untrained_rows",)
    columns = (*TOKEN_COLUMNS, *WHOLE)

    lengths: CompletionLengths
    embedding_tokenizer: PreTrainedTokenizerBase | None = None
    keep_whole: bool = False
    kept_ids: tuple[str, ...] = ()

    @property
    def features(self) -> dict[str, FeatureType]:
        ids = List(Value("int32"))
        made: dict[str, FeatureType] = {**dict.fromkeys(TOKEN_COLUMNS, ids), "label": Value("bool")}
        made |= dict.fromkeys(WHOLE, ids) if self.keep_whole else {}
        made |= {EMBEDDING_COLUMN: ids} if self.embedding_tokenizer is not None else {}
        made |= dict.fromkeys(self.kept_ids, ids)
        return made | dict.fromkeys(self.kept_numbers, Value("float64"))

    def _answers(self, row: Row, index: int) -> list[Answers]:
        if self.row_type.columns == SIDES:
            has_boundary, labels = self.row_type.is_chat or "prompt" in row, (True, False)
            *halves, _ = self.read(row, index)
        else:
            has_boundary, labels = True, (check_label(row.get("label"), self.place(index, "label")),)
            halves = [self._halves(row, index)]
        is_equal = len(halves) == 2 and halves[0] == halves[1]
        rows = []
        for label, (prompt, completion) in zip(labels, halves, strict=True):
            more = {"label": label, "equal_rows": int(is_equal and not label)}
            if (tokenizer := self.embedding_tokenizer) is not None:  # the prompt, cut to the embedding model's length
                truncation = tokenizer.model_max_length < NO_MODEL_LIMIT
                more[EMBEDDING_COLUMN] = tokenizer(prompt, truncation=truncation, verbose=False)["input_ids"]
            rows.append(Answers(index, prompt, [completion], has_boundary, more))
        return rows

    def _halves(self, row: Row, index: int) -> tuple[str, str]:
        if not self.row_type.is_chat:
            prompt = self.text_of(row, index, "prompt", may_be_empty=True)
            return prompt, self.text_of(row, index, "completion")
        place, chat = self.place(index, "completion"), self.chat_of(row, index, "prompt")
        answer = self.chat_of(row, index, "completion").messages
        check_role(answer, place)
        check_answer(answer, place)
        with place.named():
            return split_rendering(self.processing_class, chat, answer)

    def _given(self, row: Row, index: int) -> Tokens:
        self._check_given(row, index)
        label = check_label(row["label"], self.place(index, "label"))
        prompt, completion = (list(row[column]) for column in TOKEN_COLUMNS)
        kept = {column: row[column] for column in self.kept_ids}
        return Tokens(index, prompt, [completion], more={"label": label, **kept})

    def _cut(self, tokens: Tokens) -> RowDict:
        label, (completion,) = tokens.more["label"], tokens.completions
        with self.place(tokens.row, TOKEN_COLUMNS[0]).named():
            (cut,) = self.lengths.cut(tokens.prompt, [completion])
        removed = len(tokens.prompt) + len(completion) - len(cut.prompt) - len(cut.completion)
        side = cut if self.lengths.is_encoder_decoder else with_context(cut)
        is_untrained = not side.completion or (removed > 0 and cut.completion in ([], [self.lengths.eos]))
        whole = (tokens.prompt, completion) if removed else (None, None)
        return {
            **dict(zip((*TOKEN_COLUMNS, *WHOLE), (*side, *whole), strict=True)),
            **tokens.more,
            "row": tokens.row,
            "tokens": len(side.prompt) + len(side.completion),
            "removed_tokens": removed,
            "untrained_rows": int(is_untrained),
            "desirable_rows": int(label and not is_untrained),
            "undesirable_rows": int(not label and not is_untrained),
            "promptless_rows": int(not cut.prompt),
        }

    def complaint(self, numbers: Mapping[str, int]) -> tuple[str, str, str, str]:
        limit = f"max_length {self.lengths.max_length}"
        fault = f"the prompt fills {limit}, so truncation leaves no token of the completion"
        remedy = "Set or lower max_prompt_length, raise max_length, or filter the row out."
        return TOKEN_COLUMNS[1], fault, "at least one", remedy


@dataclass(frozen=True)
class Mismatching:
    """Adds to each row the completion of the row before it among `group` rows, cut behind this row's prompt (for KTO).

    The first row of a group gets its last row's. With `same_label` (rows of pairs) rows of the other label are passed
    over. For `datasets.Dataset.map` in batches of whole groups.
    """

    lengths: CompletionLengths
    group: int
    same_label: bool = False
    version: int = 3

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        """Columns `KL_completion_input_ids`, and `KL_prompt_input_ids` where the prompt was cut in another way."""
        prompts, completions = (
            [whole or cut for whole, cut in zip(batch[column], batch[name], strict=True)]
            for column, name in zip(WHOLE, TOKEN_COLUMNS, strict=True)
        )
        others = partners(batch["label"], self.group, same_label=self.same_label)
        sides = [self.lengths.cut(prompt, [completions[i]])[0] for prompt, i in zip(prompts, others, strict=True)]
        sides = sides if self.lengths.is_encoder_decoder else list(map(with_context, sides))
        cut_rows = zip(sides, batch["prompt_input_ids"], strict=True)
        return {
            KL_COLUMNS[0]: [side.completion for side in sides],
            KL_COLUMNS[1]: [None if side.prompt == prompt else side.prompt for side, prompt in cut_rows],
        }


def partners(labels: Sequence[bool], group: int, *, same_label: bool = False) -> list[int]:
    """Of each row, the one before it in its group of `group` rows; of a group's first row, its last one.

    With `same_label` the nearest one before it that has its label, where there is one.

    >>> partners([True, False, True, True, False, True, False], 3)
    [2, 0, 1, 5, 3, 4, 6]
    >>> partners([True, False, True, False], 4, same_label=True)
    [2, 3, 0, 1]
    """
    others = []
    for row, label in enumerate(labels):
        start = row - row % group
        size = min(group, len(labels) - start)
        before = [start + (row - start - step) % size for step in range(1, size)] or [row]
        alike = (other for other in before if not same_label or labels[other] == label)
        others.append(next(alike, before[0]))
    return others


def _warn_of_balance(report: PreparationReport, settings: UnpairedPreparation) -> None:
    name, good, bad = report.dataset_name, report.desirable_rows, report.undesirable_rows
    if not good or not bad:
        kind = "undesirable (label false)" if bad else "desirable (label true)"
        logger.warning("%s dataset: all %d rows are %s; both kinds teach more.", name, good + bad, kind)
    elif settings.label_weights is not None and name == "train":
        weight, counterweight = settings.label_weights
        low, high = (bound * bad / good for bound in BALANCED)
        if not low * counterweight <= weight <= high * counterweight:
            logger.warning(
                "%s dataset: %d desirable rows of weight %g and %d undesirable ones of weight %g; desirable_weight x "
                "rows over undesirable_weight x rows should be 1 to 4/3 (KTO, arXiv:2402.01306). Set desirable_weight "
                "to %.4g to %.4g, or undesirable_weight to %.4g to %.4g.",
                name, good, weight, bad, counterweight,
                low * counterweight, high * counterweight, weight / high, weight / low,
            )  # fmt: skip
