"""Rows and pairs cut to a length, in tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal, NamedTuple, cast, get_args

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from trl.data.formats import DatasetType
from trl.data.ragged import (
    is_number_list,
    last_values,
    read_ragged,
    restore_format,
    restore_streaming_format,
    without_list_sizes,
    write_ragged,
)
from trl.options.checks import check_at_least, check_one_of

TruncationMode = Literal["keep_end", "keep_start"]
TruncationOrder = Literal["sequence", "prompt_first"]
Ids = list[int]


def truncate_dataset(
    dataset: DatasetType, max_length: int, map_kwargs: dict[str, Any] | None = None
) -> DatasetType:
    """Every row with the first `max_length` items of each token column, that is of each list of numbers.

    Other columns (text, messages, images, nested lists) stay as they are.

    Raises: ValueError for `max_length` < 1, and for a packed row (with `seq_lengths`) that would have to be cut.

    >>> rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4]], "text": ["abc", "d"]})
    >>> truncate_dataset(rows, 2)[:]
    {'input_ids': [[1, 2], [4]], 'text': ['abc', 'd']}
    """
    check_at_least("max_length", max_length, minimum=1, optional=False)
    if isinstance(dataset, Mapping):
        parts = cast(Mapping[str, Dataset], dataset)
        cut = {name: truncate_dataset(part, max_length, map_kwargs) for name, part in parts.items()}
        return cast(Any, type(dataset))(cut)
    return cast(DatasetType, truncate_rows(cast(Dataset, dataset), max_length, map_kwargs))


def truncate_rows(
    dataset: Dataset | IterableDataset,
    max_length: int,
    map_kwargs: dict[str, Any] | None = None,
    *,
    keep_end: bool = False,
) -> Dataset | IterableDataset:
    """`truncate_dataset`, or with `keep_end` every row with the last items of each token column."""
    features, given = without_list_sizes(dataset.features), {"max_length": max_length, "keep_end": keep_end}
    if isinstance(dataset, IterableDataset):
        rows = dataset.with_format(None).map(truncate_row, features=features, fn_kwargs=given)
        return restore_streaming_format(rows, dataset)
    if not len(dataset):
        return dataset
    options = {**(map_kwargs or {}), "fn_kwargs": given}
    cut = dataset.with_format("arrow").map(truncate_table, batched=True, features=features, **options)
    return restore_format(cut, dataset)


def truncate_table(table: pa.Table, max_length: int, keep_end: bool = False) -> pa.Table:
    """`truncate_rows` on an arrow table; lists of a fixed size become free ones."""
    for index, field in enumerate(table.schema):
        if not is_number_list(field.type):
            continue
        longest = pc.max(pc.list_value_length(table[index])).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
        if longest > max_length:
            _refuse_packed("seq_lengths" in table.column_names, longest, max_length)
        if longest > max_length or pa.types.is_fixed_size_list(field.type):
            if keep_end:
                column = write_ragged(
                    last_values(read_ragged(table[index], field.name), max_length), field.type
                )
            else:
                first = pc.list_slice(table[index], 0, max_length, return_fixed_size_list=False)  # pyright: ignore[reportAttributeAccessIssue]
                kind: Any = pa.large_list if pa.types.is_large_list(field.type) else pa.list_
                column = first.cast(kind(field.type.value_type))
            table = table.set_column(index, pa.field(field.name, column.type), column)
    return table


def truncate_row(row: dict[str, Any], max_length: int, keep_end: bool = False) -> dict[str, Any]:
    """`truncate_rows` on one row."""
    flat: dict[str, Any] = {
        name: ids for name, ids in row.items() if isinstance(ids, list) or getattr(ids, "ndim", 0) == 1
    }
    long = [name for name, ids in flat.items() if len(ids) > max_length]
    first = {name: flat[name] if isinstance(flat[name], list) else flat[name][:1].tolist() for name in long}
    kept = slice(-max_length, None) if keep_end else slice(max_length)
    cut = {name: row[name][kept] for name in long if isinstance(first[name][0], Number)}
    if cut:
        _refuse_packed("seq_lengths" in row, max(len(row[name]) for name in cut), max_length)
    return {**row, **cut}


def _refuse_packed(is_packed: bool, longest: int, max_length: int) -> None:
    if is_packed:
        raise ValueError(
            f"a packed row has {longest} tokens, more than max_length {max_length}: its sequences would be cut. Truncate "
            "before packing, or raise max_length."
        )


def truncate_with_protected_tokens(
    ids: list[int], target_length: int, protected_tokens: Sequence[int]
) -> list[int]:
    """The last tokens of a sequence and all of its `protected_tokens`, `target_length` altogether, in their order.

    Raises: ValueError where there are more protected tokens than that.

    >>> truncate_with_protected_tokens([9, 1, 2, 3], 2, [9])
    [9, 3]
    """
    protected = set(protected_tokens)
    room = target_length - sum(token in protected for token in ids)
    if room < 0:
        raise ValueError(
            f"target_length {target_length} must be at least the number of protected tokens, "
            f"{target_length - room}. Raise it, or protect fewer tokens."
        )
    others = [position for position, token in enumerate(ids) if token not in protected]
    dropped = set(others[: max(len(others) - room, 0)])
    return [token for position, token in enumerate(ids) if position not in dropped]


class Side(NamedTuple):
    """A completion and the prompt that it is scored behind."""

    prompt: Ids
    completion: Ids


@dataclass(frozen=True)
class PairLengths:
    """Limits of prompts and completions in tokens, None for none, and the order in which they are applied.

    - "sequence" (DPO): prompts keep their last `max_prompt_length` tokens, completions their first
      `max_completion_length`; then each prompt + completion keeps its last ("keep_end") or first ("keep_start")
      `max_length`. Under "keep_end" the prompts of a pair may differ then.
    - "prompt_first" (CPO, ORPO): only where the prompt and the longest completion exceed `max_length`, the prompt
      keeps its last or first `max_prompt_length` tokens, and if that is not enough every completion its first
      `max_length - max_prompt_length`. Without `max_length` prompts are cut wherever they are too long;
      `max_completion_length` acts on encoder-decoders only.

    The two sides of an encoder-decoder do not share a sequence: there `max_length` does nothing, and a prompt keeps its eos.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: TruncationMode = "keep_end"
    truncation_order: TruncationOrder = "sequence"
    is_encoder_decoder: bool = False

    def __post_init__(self) -> None:
        for name in ("max_length", "max_prompt_length", "max_completion_length"):
            check_at_least(name, getattr(self, name), minimum=1)
        check_one_of("truncation_mode", self.truncation_mode, get_args(TruncationMode))
        check_one_of("truncation_order", self.truncation_order, get_args(TruncationOrder))

    def cut(self, prompt: Ids, completions: list[Ids]) -> list[Side]:
        """What is left of each completion and of its prompt; either may be empty.

        Raises: ValueError where `max_prompt_length` leaves nothing of `max_length` for a completion that needs it.

        >>> PairLengths(max_length=4).cut([1, 2, 3], [[4], [5, 6]])
        [Side(prompt=[1, 2, 3], completion=[4]), Side(prompt=[2, 3], completion=[5, 6])]
        """
        limit, keeps_start = self.max_prompt_length, self.truncation_mode == "keep_start"
        last = prompt if limit is None else prompt[-limit:]
        shorter = [completion[: self.max_completion_length] for completion in completions]
        if self.is_encoder_decoder:
            if (
                limit is not None
                and keeps_start
                and self.truncation_order == "prompt_first"
                and last != prompt
            ):
                last = [*prompt[: limit - 1], prompt[-1]]
            return [Side(last, completion) for completion in shorter]
        if self.truncation_order == "sequence":
            return [self._cut_sequence(last, completion) for completion in shorter]
        longest, most = max(map(len, completions)), self.max_length
        if most is None or len(prompt) + longest > most:
            prompt = prompt[:limit] if keeps_start else last
        if most is None or len(prompt) + longest <= most:
            return [Side(prompt, completion) for completion in completions]
        self._check_room()
        room = max(most - (len(prompt) if limit is None else limit), 0)
        return [Side(prompt[:most], completion[:room]) for completion in completions]

    def _cut_sequence(self, prompt: Ids, completion: Ids) -> Side:
        excess = 0 if self.max_length is None else len(prompt) + len(completion) - self.max_length
        if excess <= 0:
            return Side(prompt, completion)
        if self.truncation_mode == "keep_end":
            return Side(prompt[excess:], completion[max(excess - len(prompt), 0) :])
        room = len(completion) - excess
        if room <= 0:
            self._check_room()
        return Side(prompt[: self.max_length], completion[: max(room, 0)])

    def _check_room(self) -> None:
        limit, most = self.max_prompt_length, self.max_length
        if limit is not None and most is not None and limit >= most:
            raise ValueError(
                f"max_prompt_length {limit} leaves no token of max_length {most} for a completion, expected less. Lower "
                "max_prompt_length, or raise max_length."
            )


def with_context(side: Side) -> Side:
    """A completion of which no prompt is left, with its first token, which nothing predicts, as its prompt.

    >>> with_context(Side([], [7, 8, 9]))
    Side(prompt=[7], completion=[8, 9])
    """
    return side if side.prompt else Side(side.completion[:1], side.completion[1:])
