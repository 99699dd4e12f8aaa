"""Rows that come as tokens: what their attention masks hide is removed, and documents packed before are told apart."""

from collections.abc import Collection, Sequence

import numpy as np

from trl.data.formats import Row, RowDict
from trl.data.validation import Place

ALIGNED = ("input_ids", "labels", "completion_mask", "assistant_masks", "token_type_ids", "position_ids")
"""Columns with one value for each token, under the names that they have beside `attention_mask`."""


def mask_columns(columns: Collection[str]) -> list[str]:
    """The columns that say which tokens of another one are real.

    >>> mask_columns(["prompt_input_ids", "prompt_attention_mask", "pixel_attention_mask"])
    ['prompt_attention_mask']
    """
    masks = [name for name in columns if "attention_mask" in name]
    return [name for name in masks if name.replace("attention_mask", "input_ids") in columns]


def is_plain(columns: Collection[str], *, may_be_packed: bool = False) -> bool:
    """Whether rows of these columns are what `real_row` makes of them."""
    return not (mask_columns(columns) or {"position_ids", *(() if may_be_packed else ("seq_lengths",))} & {*columns})


def real_row(row: Row, dataset: str, index: int, *, splits: str | None = None) -> RowDict:
    """A row without masked tokens, masks and `position_ids`; several documents have `seq_lengths`.

    Some packers number the documents in `attention_mask`: 1, 1, 2, 0.

    `dataset` and `index` name the row in errors; `splits` is the remedy where rows of several documents are refused.
    Raises: ValueError for these, and for masks and positions that contradict the other columns.

    >>> real_row({"input_ids": [0, 5, 6, 7], "position_ids": [0, 0, 1, 0], "attention_mask": [0, 1, 1, 1]}, "train", 0)
    {'input_ids': [5, 6, 7], 'seq_lengths': [2, 1]}
    """
    masks = mask_columns(row)
    made = {name: value for name, value in row.items() if name not in masks}
    for name in masks:
        if row[name] is not None:
            made |= _cut(row, name, Place(dataset, index, name))
    if "input_ids" not in row:
        return made
    positions, lengths = made.pop("position_ids", None), made.get("seq_lengths")
    place = Place(dataset, index, "seq_lengths" if positions is None else "position_ids")
    if positions is not None:
        documents = _document_lengths(np.asarray(positions), len(made["input_ids"]), place)
        _check_equal(documents, lengths, place)
        if len(documents) > 1:
            made["seq_lengths"] = lengths = documents
    if splits and len(lengths or ()) > 1:
        raise place.error(f"a packed row of {len(lengths or ())} documents", "one of one", splits)
    return made


def _cut(row: Row, name: str, place: Place) -> RowDict:
    """The columns that a mask belongs to, without what it hides."""
    mask, cut = np.asarray(row[name]), {}
    for column in (name.replace("attention_mask", aligned) for aligned in ALIGNED):
        if (values := row.get(column)) is None:
            continue
        if mask.shape != (len(values),):
            counts = f"{mask.size} values for {len(values)} tokens in {column!r}"
            raise place.error(counts, "as many", "Give 1 for each token, 0 for padding.")
        cut[column] = np.asarray(values)[mask != 0].tolist()
    real, of_rows = mask[mask != 0], name == "attention_mask"
    if (wrong := real[~np.isin(np.diff(real, prepend=0), (0, 1)) if of_rows else real != 1]).size:
        expected = f"1 for each token{', or the number of its document' if of_rows else ''}, 0 for padding"
        raise place.error(f"value {wrong[0]}", expected, "Correct the mask.")
    lengths = row.get("seq_lengths") if of_rows else None
    if lengths is not None and sum(lengths) == len(mask):
        parts = np.split(mask != 0, np.cumsum(lengths)[:-1])
        lengths = cut["seq_lengths"] = [int(part.sum()) for part in parts if part.any()]
    if of_rows and real.size and real[-1] > 1:
        cut["seq_lengths"] = np.unique(real, return_counts=True)[1].tolist()
        _check_equal(cut["seq_lengths"], lengths, place)
    return cut


def _check_equal(documents: list[int], lengths: Sequence[int] | None, place: Place) -> None:
    if lengths is not None and list(lengths) != documents:
        expected = f"{list(lengths)} as in 'seq_lengths'"
        raise place.error(f"documents of {documents} tokens", expected, "Remove one of both.")


def _document_lengths(positions: np.ndarray, tokens: int, place: Place) -> list[int]:
    if positions.shape != (tokens,):
        raise place.error(f"shape {positions.shape} for {tokens} tokens", "one for each", "Remove the column.")
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    if (wrong := positions[starts][positions[starts] != 0]).size:
        remedy = "Count each document from 0, or remove the column."
        raise place.error(f"a document begins at {wrong[0]}", "0", remedy)
    return np.diff(starts, append=tokens).tolist()
