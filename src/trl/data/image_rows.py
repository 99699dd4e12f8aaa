"""Rows with images: what they must look like, and their text with a placeholder for each image.

Such rows stay as they are until a batch is made of them, because images become numbers only there; what can be told
without decoding an image is checked before the first step.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image, IterableDataset, LargeList, List
from transformers import ProcessorMixin
from transformers.image_utils import is_valid_image

from trl.data.formats import column_names, maybe_convert_to_chatml, prepare_multimodal_messages
from trl.data.rendering import Chat, Message, render, split_rendering, template_source, text_tokenizer
from trl.data.tokenization import template_inputs
from trl.data.validation import (
    Place,
    SFTRowType,
    accepted_roles,
    check_messages,
    check_text,
    sft_row_type,
    warn_of_unread_tools,
)

IMAGE_COLUMNS = ("images", "image")
ROWS_RENDERED = 64  # before the first step; a stream's other rows are met in training

PlaceOf = Callable[[int, str], Place]


class TextHalves(NamedTuple):
    """A row's text, cut where its completion begins; without a completion all of it is `completion`."""

    prompt: str
    completion: str


def image_column(columns: Sequence[str]) -> str | None:
    """The column that holds images, or None.

    Raises: ValueError where there are two.

    >>> image_column(["messages", "images"])
    'images'
    """
    found = [column for column in IMAGE_COLUMNS if column in columns]
    if len(found) == 2:
        raise ValueError(
            "the rows have the columns 'images' and 'image', expected one of them. Put all images into 'images'."
        )
    return found[0] if found else None


def has_images(*datasets: Any) -> bool:
    """Whether one of some data sets (or of dicts of them by name) has a column of images."""
    parts: list[Any] = []
    for dataset in datasets:
        parts += dataset.values() if isinstance(dataset, dict) else [dataset]
    return any(
        set(IMAGE_COLUMNS) & set(column_names(part))
        for part in parts
        if isinstance(part, (Dataset, IterableDataset))
    )


def refuse_images(dataset: Any, *, name: str) -> None:
    """Raise ValueError for a data set with images that is given to a trainer of text."""
    if has_images(dataset):
        raise ValueError(
            f"{name} dataset has a column of images ({' or '.join(IMAGE_COLUMNS)}), but this trainer was made for rows of text. "
            "SFTTrainer, DPOTrainer, GRPOTrainer and RLOOTrainer take images if the data sets given to their constructor have "
            "them; or remove the column."
        )


def image_row_type(
    columns: Sequence[str], row: Mapping[str, Any], *, text_field: str, name: str
) -> SFTRowType:
    """The type of rows with images.

    Raises: ValueError for tokens, in which an image has no place any more, and for columns of no known type.
    """
    row_type = sft_row_type(columns, row, text_field=text_field, name=name)
    if row_type.kind == "tokens":
        raise ValueError(
            f"{name} dataset, row 0, column 'input_ids': tokens beside images, expected text or messages. Remove the "
            "column: the processor makes the tokens together with the images."
        )
    return row_type


def read_images(row: Mapping[str, Any], column: str | None, place: Place) -> list[Any]:
    """The images of one row, in their order.

    Raises: ValueError for None, TypeError for what is no image.
    """
    if column is None:
        return []
    value = row.get(column)
    images = [value] if column == "image" else value
    if value is None:
        raise ValueError(f"{place}: None, expected {_EXPECTED[column]}. {_WITHOUT[column]}")
    if not isinstance(images, list | tuple):
        raise TypeError(f"{place}: a {type(value).__name__}, expected {_EXPECTED[column]}. Put it in a list.")
    for index, image in enumerate(images):
        if image is None:
            raise ValueError(f"{place}: image {index} is None, expected an image. Leave it out of the list.")
        if not is_valid_image(image):
            raise TypeError(
                f"{place}: image {index} is of type {type(image).__name__}, expected a PIL image. {_CAST[column]}"
            )
    return list(images)


_EXPECTED = {"images": "a list of images", "image": "an image"}
_WITHOUT = {
    "images": "Give [] for a row without images, or filter the row out.",
    "image": "Filter the row out, or use a column 'images' with [] for rows without images.",
}
_CAST = {
    "images": 'Let datasets decode the column: cast_column("images", List(Image())).',
    "image": 'Let datasets decode the column: cast_column("image", Image()).',
}


@dataclass(frozen=True)
class ImageRows:
    """Puts the images of rows of one type into their messages and renders them; `place` names a row in errors."""

    processor: ProcessorMixin
    row_type: SFTRowType
    column: str | None
    place: PlaceOf

    @property
    def placeholder(self) -> str | None:
        """The text that the processor replaces by an image's tokens; None where it does not say."""
        token = getattr(self.processor, "image_token", None)
        return None if token is None else str(token)

    def halves(self, row: Mapping[str, Any], index: int, images: list[Any]) -> TextHalves:
        """The text of a row, ready for the processor: it ends with a stop token and has a placeholder for each image.

        Raises: ValueError or TypeError naming row and column.
        """
        if not self.row_type.is_conversational:
            return self._closed(self.texts(row, index, images))
        messages, prompt_length = self.conversation(row, index, images)
        chat = self._chat(row, index, messages)
        place = self.place(index, self.row_type.columns[-1])
        with place.named():
            if prompt_length:
                prompt = chat._replace(messages=messages[:prompt_length])
                found = TextHalves(*split_rendering(self.processor, prompt, messages[prompt_length:]))
            else:
                found = TextHalves("", render(self.processor, chat))
        return self._counted(found, images, place)

    def check(self, row: Mapping[str, Any], index: int, images: list[Any], *, is_rendered: bool) -> None:
        """Raise what `halves` raises; what only rendering shows is left out unless `is_rendered`."""
        if is_rendered:
            self.halves(row, index, images)
        elif self.row_type.is_conversational:
            self.conversation(row, index, images)
        else:
            self.texts(row, index, images)

    def conversation(
        self, row: Mapping[str, Any], index: int, images: list[Any]
    ) -> tuple[list[Message], int]:
        """All messages of a row with the images in their places, and how many of them are the prompt."""
        converted = maybe_convert_to_chatml(dict(row))
        roles = accepted_roles(template_source(self.processor))
        turns = []
        for column in self.row_type.columns:
            place = self.place(index, column)
            turns.append(check_messages(converted.get(column), place, roles=roles))
            self._check_no_placeholder(turns[-1], place)
        with self.place(index, self.column or self.row_type.columns[0]).named():
            placed = prepare_multimodal_messages([message for turn in turns for message in turn], images)
        return placed, len(turns[0]) if len(turns) == 2 else 0

    def texts(self, row: Mapping[str, Any], index: int, images: list[Any]) -> TextHalves:
        """The text columns of a standard row, which hold a placeholder for each image."""
        columns = self.row_type.columns
        texts = [
            check_text(row.get(column), self.place(index, column), may_be_empty=column == "prompt")
            for column in columns
        ]
        halves = TextHalves(*texts) if len(texts) == 2 else TextHalves("", texts[0])
        return self._counted(halves, images, self.place(index, self.column or columns[0]))

    def _check_no_placeholder(self, messages: list[Message], place: Place) -> None:
        """The placeholder belongs to the template: written out in a message, it would stand for one image more."""
        if not self.placeholder:
            return
        for index, message in enumerate(messages):
            content = message.get("content") or []
            parts = [content] if isinstance(content, str) else [part.get("text") for part in content]
            if any(isinstance(part, str) and self.placeholder in part for part in parts):
                raise ValueError(
                    f"{place}, message {index}: the text holds the placeholder {self.placeholder!r}, which the chat "
                    'template writes itself. Remove it, or write {"type": "image"} parts where images belong.'
                )

    def _chat(self, row: Mapping[str, Any], index: int, messages: list[Message]) -> Chat:
        return Chat(messages, *template_inputs(row, self.place(index, "tools")))

    def _counted(self, halves: TextHalves, images: list[Any], place: Place) -> TextHalves:
        found = sum(half.count(self.placeholder) for half in halves) if self.placeholder else len(images)
        if found != len(images):
            remedy = (
                "Use the processor's own chat template."
                if self.row_type.is_conversational
                else "Write one where each image belongs, and give the images in a column 'images' or 'image'."
            )
            given = f"{len(images)} images for {found} placeholders {self.placeholder!r} in the text"
            raise place.error(given, "as many", remedy)
        return halves

    def _closed(self, halves: TextHalves) -> TextHalves:
        """Plain text ends with the eos token, and begins with one begin token where the tokenizer writes it too."""
        tokenizer: Any = text_tokenizer(self.processor)
        written = tokenizer("").input_ids
        begin, end = tokenizer.bos_token, tokenizer.eos_token
        prompt, completion = halves
        if begin and tokenizer.bos_token_id in written:
            prompt = prompt.removeprefix(begin)
            completion = completion if prompt else completion.removeprefix(begin)
        if end and not completion.endswith(end) and tokenizer.eos_token_id not in written:
            completion += end
        return TextHalves(prompt, completion)


# ---- a whole data set


class RowCheck(Protocol):
    """Raises for a row that cannot be trained on."""

    def __call__(
        self, row: Mapping[str, Any], index: int, images: list[Any], *, is_rendered: bool
    ) -> None: ...


def check_image_rows(
    dataset: Dataset | IterableDataset, processor: ProcessorMixin, *, text_field: str, name: str
) -> SFTRowType:
    """Check every row of a data set with images as `check_every_row` does, and return the type of the rows.

    Raises: ValueError, TypeError or FileNotFoundError naming row, column and remedy.
    """
    columns = column_names(dataset)
    column = image_column(columns)
    row_type = image_row_type(
        columns, first_texts(dataset, column, name=name), text_field=text_field, name=name
    )
    rows = ImageRows(processor, row_type, column, lambda index, column: Place(name, index, column))
    check_every_row(dataset, rows.check, column, name=name)
    if row_type.is_conversational:
        warn_of_unread_tools(dataset, processor, name=name)
    return row_type


def first_texts(dataset: Dataset | IterableDataset, column: str | None, *, name: str) -> Mapping[str, Any]:
    """The first row of a data set without its images, where they can be left out.

    Raises: ValueError where there is no row.
    """
    rows = _texts(dataset, column) if is_stored(dataset) else dataset
    found = next(iter(rows), None)
    if found is None and is_stored(dataset) and len(dataset):
        return {}  # a data set of images only has rows without columns
    if found is None:
        raise ValueError(
            f"{name} dataset: no rows, expected at least one with images. Check its file and filters."
        )
    return found


def check_every_row(
    dataset: Dataset | IterableDataset, check: RowCheck, column: str | None, *, name: str
) -> None:
    """Check all rows without decoding their images; the first rows are also rendered.

    Of a stream, and of a data set with a transform, the first rows only are checked here; the collator checks the others
    as they pass.
    """
    if is_stored(dataset):
        if column is not None:
            _check_feature(dataset.features[column], Place(name, 0, column))
        counts = stored_images(dataset, column, name=name).tolist()
        for index, (row, count) in enumerate(zip(_texts(dataset, column), counts, strict=True)):
            check(row, index, [_ANY_IMAGE] * count, is_rendered=index < ROWS_RENDERED)
        return
    for index, row in enumerate(dataset.take(ROWS_RENDERED)):
        check(row, index, read_images(row, column, Place(name, index, column or "")), is_rendered=True)


def is_stored(dataset: Any) -> TypeGuard[Dataset]:
    """Whether all rows of a data set can be looked at, and are what training sees."""
    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def _texts(dataset: Dataset, column: str | None) -> Any:
    return dataset.with_format(None).select_columns(
        [other for other in dataset.column_names if other != column]
    )


_ANY_IMAGE = "an image that is not decoded"


def _check_feature(feature: Any, place: Place) -> None:
    """Raise TypeError for a column of which `datasets` does not decode images."""
    inner = feature.feature if isinstance(feature, List | LargeList) and place.column == "images" else feature
    is_empty = str(getattr(inner, "dtype", "")) == "null"
    is_list = inner is not feature or place.column == "image" or is_empty
    if is_list and (is_empty or (isinstance(inner, Image) and inner.decode)):
        return
    raise TypeError(
        f"{place}: values of type {feature}, expected {_EXPECTED[place.column]}. {_CAST[place.column]}"
    )


def stored_images(dataset: Dataset, column: str | None, *, name: str) -> np.ndarray:
    """How many images each row of a stored data set has, `(rows,)`, read off the table without decoding them.

    Raises: ValueError for None, FileNotFoundError for an image that is a path to no file.
    """
    if column is None:
        return np.zeros(len(dataset), np.int64)
    counts, start = [], 0
    for table in dataset.select_columns(column).with_format("arrow").iter(batch_size=1000):
        cells = table[column]  # type: ignore[index]
        cells = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
        counts.append(_count_cells(cells, column, lambda row, first=start: Place(name, first + row, column)))
        start += len(cells)
    return np.concatenate(counts)


def _count_cells(cells: Any, column: str, place: Callable[[int], Place]) -> np.ndarray:
    is_list = pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type)
    images = cells.flatten() if is_list else cells
    owners = pc.list_parent_indices(cells).to_numpy() if is_list else np.arange(len(cells))  # type: ignore[attr-defined]
    missing = _is_missing(images)
    for row in np.flatnonzero(_is_null(cells) if is_list else missing):
        raise ValueError(f"{place(int(row))}: None, expected {_EXPECTED[column]}. {_WITHOUT[column]}")
    for index in np.flatnonzero(missing):
        row = int(owners[index])
        position = int(index - np.searchsorted(owners, row))
        raise ValueError(
            f"{place(row)}: image {position} is None, expected an image. Leave it out of the list."
        )
    if pa.types.is_struct(images.type):
        _check_files(images, owners, place)
    return pc.list_value_length(cells).to_numpy() if is_list else np.ones(len(cells), np.int64)  # type: ignore[attr-defined]


def _is_null(values: Any) -> np.ndarray:
    return values.is_null().to_numpy(zero_copy_only=False)


def _is_missing(images: Any) -> np.ndarray:
    """Which stored images have neither bytes nor a path."""
    if not pa.types.is_struct(images.type):
        return _is_null(images)
    return _is_null(pc.struct_field(images, "bytes")) & _is_null(pc.struct_field(images, "path"))  # type: ignore[attr-defined]


def _check_files(images: Any, owners: np.ndarray, place: Callable[[int], Place]) -> None:
    paths = pc.struct_field(images, "path").to_pylist()  # type: ignore[attr-defined]
    for index in np.flatnonzero(_is_null(pc.struct_field(images, "bytes"))):  # type: ignore[attr-defined]
        if "://" not in paths[index] and not os.path.isfile(paths[index]):
            raise FileNotFoundError(
                f"{place(int(owners[index]))}: there is no file {paths[index]!r}, expected an image's path. Correct it; a "
                "relative path starts at the working directory."
            )
