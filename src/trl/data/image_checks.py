"""Data sets with images, checked before the first step without decoding an image."""

import logging
import os
from collections.abc import Mapping
from typing import Any, TypeGuard

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image, IterableDataset, LargeList, List
from transformers import ProcessorMixin

from trl.data.formats import column_names, is_list_of_dicts_with, maybe_convert_to_chatml
from trl.data.image_rows import (
    CAST,
    EXPECTED,
    IMAGE_COLUMNS,
    WITHOUT,
    ImagePairs,
    ImagePrompts,
    ImageRows,
    image_column,
    image_pairs,
    image_rows,
    refuse_tokens,
)
from trl.data.pipeline import first_row
from trl.data.validation import Place, RowType, warn_of_unread_tools

logger = logging.getLogger(__name__)

ROWS_RENDERED = 64  # before the first step; a stream's other rows are met in training
_ANY_IMAGE = "an image that is not decoded"


def check_image_rows(
    dataset: Dataset | IterableDataset, processor: ProcessorMixin, *, text_field: str, name: str
) -> RowType:
    """Check every row of a data set with images as `check_every_row` does, and return the type of the rows.

    Raises: ValueError, TypeError or FileNotFoundError naming row, column and remedy.
    """
    first, columns = _first_texts(dataset, name), column_names(dataset)
    rows = image_rows(first, columns, processor, text_field=text_field, name=name)
    check_every_row(dataset, rows)
    if rows.row_type.is_chat:
        warn_of_unread_tools(dataset, processor, name=name)
    return rows.row_type


def check_pair_image_rows(
    dataset: Dataset | IterableDataset, processor: ProcessorMixin, *, name: str, tools: Any = None
) -> RowType:
    """Check every pair of a data set with images as `check_every_row` does, and return the type of the rows.

    Raises: ValueError, TypeError or FileNotFoundError naming row, column and remedy.
    """
    rows = image_pairs(_first_texts(dataset, name), column_names(dataset), processor, tools=tools, name=name)
    check_every_row(dataset, rows)
    warn_of_unread_tools(dataset, processor, name=name, is_chat=rows.row_type.is_chat, tools=tools)
    return rows.row_type


def check_image_prompts(
    dataset: Dataset, processor: Any, *, name: str, template_kwargs: Mapping[str, Any] | None = None
) -> ImagePrompts:
    """How the prompts of a data set are rendered, after a check of all of its rows.

    A row has a `prompt`, text with a placeholder for each image or messages, and `images` (a list) or `image`, or neither.

    Raises: ValueError, TypeError or FileNotFoundError naming row, column and remedy.
    """
    columns = dataset.column_names
    if "input_ids" in columns:
        refuse_tokens(RowType("tokens", ("input_ids",)), name)
    if "prompt" not in columns:
        raise ValueError(
            f"{name} dataset has columns {columns}, expected 'prompt' (text or messages) beside the images. Rename the column "
            "that holds the prompts."
        )
    first = maybe_convert_to_chatml(dict(_first_texts(dataset, name)))
    row_type = RowType(
        "messages" if is_list_of_dicts_with(first.get("prompt"), "role") else "text", ("prompt",)
    )
    prompts = ImagePrompts(
        processor, row_type, image_column(columns), name, template_kwargs=dict(template_kwargs or {})
    )
    check_every_row(dataset, prompts)
    return prompts


def check_every_row(dataset: Dataset | IterableDataset, rows: ImageRows) -> None:
    """Check all rows without decoding their images; the first rows are also rendered. Counts equal pairs in a warning.

    Of a stream, and of a data set with a transform, the first rows only are checked here; the collator checks the others
    as they pass.
    """
    equal, seen = 0, ""
    if _is_stored(dataset):
        counts = stored_images(dataset, rows.column, name=rows.dataset_name)
        given: Any = zip(_texts(dataset), ([_ANY_IMAGE] * count for count in counts), strict=True)
    else:
        seen, given = "first ", ((row, None) for row in dataset.take(ROWS_RENDERED))
    for index, (row, images) in enumerate(given):
        images = rows.images(row, index) if images is None else images
        rows.halves(row, index, images, is_rendered=index < ROWS_RENDERED)
        equal += isinstance(rows, ImagePairs) and row["chosen"] == row["rejected"]
    if equal:
        logger.warning(
            "%s dataset: in %d of the %srows 'chosen' equals 'rejected', which teaches nothing. Filter them out.",
            rows.dataset_name,
            equal,
            seen,
        )


def _is_stored(dataset: Any) -> TypeGuard[Dataset]:
    """Whether all rows of a data set can be looked at, and are what training sees."""
    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def _texts(dataset: Any) -> Any:
    """The rows without their images."""
    return dataset.with_format(None).remove_columns([c for c in IMAGE_COLUMNS if c in dataset.column_names])


def _first_texts(dataset: Any, name: str) -> Mapping[str, Any]:
    """The first row of a data set, without its images where they can be left out."""
    if not _is_stored(dataset) or not len(dataset):
        return first_row(dataset, name, "images")
    return next(iter(_texts(dataset)), {})  # without any other column, there are no rows


def stored_images(dataset: Dataset, column: str | None, *, name: str) -> list[int]:
    """How many images each row of a stored data set has, read off the table without decoding them.

    Raises: TypeError for a column that `datasets` does not decode, ValueError for None, FileNotFoundError for an image
    that is a path to no file.
    """
    if column is None:
        return [0] * len(dataset)
    _check_feature(dataset.features[column], Place(name, 0, column))
    found: list[int] = []
    for table in dataset.select_columns(column).with_format("arrow").iter(batch_size=1000):
        cells: Any = table[column]  # type: ignore[index]
        cells = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
        is_list = pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type)
        lengths = pc.list_value_length(cells).to_pylist() if is_list else [1] * len(cells)  # type: ignore[attr-defined]
        sources = iter(_sources(cells.flatten() if is_list else cells))
        for length in lengths:
            place = Place(name, len(found), column)
            own = [next(sources) for _ in range(length or 0)]
            if length is None or (not is_list and own == [None]):
                raise place.error("None", EXPECTED[column], WITHOUT[column])
            for index, source in enumerate(own):
                if source is None:
                    raise place.error(f"image {index} is None", "an image", "Leave it out of the list.")
                if source and "://" not in source and not os.path.isfile(source):
                    raise FileNotFoundError(
                        f"{place}: there is no file {source!r}, expected an image's path. Correct it; a relative path "
                        "starts at the working directory."
                    )
            found.append(length)
    return found


def _sources(images: Any) -> list[str | None]:
    """Of each stored image its path, "" where its bytes are stored, None where it is missing."""
    if not pa.types.is_struct(images.type):
        return ["" if is_valid else None for is_valid in images.is_valid().to_pylist()]
    has_bytes = pc.struct_field(images, "bytes").is_valid()  # type: ignore[attr-defined]
    return pc.if_else(has_bytes, "", pc.struct_field(images, "path")).to_pylist()  # type: ignore[attr-defined]


def _check_feature(feature: Any, place: Place) -> None:
    """Raise TypeError for a column of which `datasets` does not decode images."""
    inner = feature.feature if isinstance(feature, List | LargeList) and place.column == "images" else feature
    is_empty = str(getattr(inner, "dtype", "")) == "null"
    is_list = inner is not feature or place.column == "image" or is_empty
    if not is_list or not (is_empty or (isinstance(inner, Image) and inner.decode)):
        given = f"values of type {feature}"
        raise place.error(given, EXPECTED[place.column], CAST[place.column], TypeError)
