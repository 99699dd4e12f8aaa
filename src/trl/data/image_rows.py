"""Rows with images: their text with a placeholder for each image, and checks before the first step.

Such rows stay as they are until a batch is made of them, because images become numbers only there; the checks decode
none.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image, IterableDataset, LargeList, List
from datasets.features.features import FeatureType
from transformers import ProcessorMixin
from transformers.image_utils import is_valid_image

from trl.data.formats import (
    IMAGE_COLUMNS,
    Row,
    column_names,
    image_column,
    is_list_of_dicts_with,
    maybe_convert_to_chatml,
    prepare_multimodal_messages,
)
from trl.data.preference_rows import SIDES, PairReader
from trl.data.rendering import Chat, render, render_prompt, split_rendering, template_source, text_tokenizer
from trl.data.tokenization import single_begin, template_inputs
from trl.data.validation import Place, RowType, check_messages, check_text, warn_of_unread_tools

logger = logging.getLogger(__name__)

ROWS_RENDERED = 64  # before the first step; a stream's other rows are met in training
LLAVA_PLACEHOLDER = "<image>"  # also of LLaMA-Factory's rows
_ANY_IMAGE = "an image that is not decoded"

EXPECTED = {"images": "a list of images", "image": "an image"}
WITHOUT = {
    "images": "Give [] for a row without images, or filter the row out.",
    "image": "Filter the row out, or use a column 'images' with [] for rows without images.",
}
CAST = {
    name: f'Let datasets decode the column: rows.cast_column("{name}", {kind}); for a command, then rows.to_parquet.'
    for name, kind in (("images", "List(Image())"), ("image", "Image()"))
}


class TextHalves(NamedTuple):
    """A row's text, cut where its completion begins; without a completion all of it is `completion`."""

    prompt: str
    completion: str


class Turns(NamedTuple):
    """Prompt and completion of a row, texts or messages; the prompt may be empty. `column` names the row in errors."""

    column: str
    prompt: Any
    completion: Any


@dataclass(frozen=True)
class ImageRows:
    """Rows of one type as texts with a placeholder for each image; `dataset_name` "" is a batch.

    `tools` stand in for those of the rows' column.
    """

    processor: ProcessorMixin
    row_type: RowType
    column: str | None
    dataset_name: str = ""
    tools: list[dict | Callable] | None = None

    def __post_init__(self) -> None:
        if self.row_type.kind == "tokens":
            remedy = "Remove the columns of tokens: the processor makes them."
            place = self.place(0, self.row_type.columns[0])
            raise place.error("tokens beside images", "text or messages", remedy)

    @property
    def adds_special(self) -> bool:
        """Whether the tokenizer adds its special tokens: a chat template has written them already."""
        return not self.row_type.is_chat

    def place(self, index: int, column: str) -> Place:
        return Place(self.dataset_name, index, column)

    def images(self, row: Row, index: int) -> list:
        """The images of a row, in their order.

        Raises: ValueError for None, TypeError for what is no image.
        """
        if (column := self.column) is None:
            return []
        value, place = row.get(column), self.place(index, column)
        if value is None:
            raise place.error("None", EXPECTED[column], WITHOUT[column])
        images = [value] if column == "image" else value
        if not isinstance(images, list | tuple):
            raise place.error(f"a {type(value).__name__}", EXPECTED[column], "Put it in a list.", TypeError)
        for number, image in enumerate(images):
            if image is None:
                raise place.error(f"image {number} is None", "an image", "Leave it out of the list.")
            if not is_valid_image(image):
                fault = f"image {number} is of type {type(image).__name__}"
                raise place.error(fault, "a PIL image", CAST[column], TypeError)
        return list(images)

    def turns(self, row: Row, index: int) -> list[Turns]:
        """The row's prompts and completions, checked: one sequence, or two of a pair."""
        *heads, column = self.row_type.columns
        prompt = self._half(row, index, heads[0]) if heads else ([] if self.row_type.is_chat else "")
        return [Turns(column, prompt, self._half(row, index, column))]

    def _half(self, row: Row, index: int, column: str) -> Any:
        place = self.place(index, column)
        if not self.row_type.is_chat:
            return check_text(row.get(column), place, may_be_empty=column == "prompt")
        template = template_source(self.processor)
        return check_messages(maybe_convert_to_chatml(dict(row)).get(column), place, template=template)

    def halves(self, row: Row, index: int, images: list, *, is_rendered: bool = True) -> list[TextHalves]:
        """The texts of a row, ready for the processor, with a stop token at the end and a placeholder for each image.

        Conversations are only checked unless `is_rendered`.

        Raises: ValueError or TypeError naming row and column.
        """
        texts = []
        for turns in self.turns(row, index):
            if not self.row_type.is_chat:
                halves, place = TextHalves(*turns[1:]), self.place(index, self.column or turns.column)
                self._check_count(halves, images, place)
                texts.append(self._closed(halves))
                continue
            place = self.place(index, turns.column)
            with self.place(index, self.column or self.row_type.columns[0]).named():
                placed = prepare_multimodal_messages([*turns.prompt, *turns.completion], images)
            if is_rendered:
                inputs = template_inputs(row, self.place(index, "tools"), tools=self.tools)
                with place.named():
                    texts.append(self._rendered(Chat(placed, *inputs), len(turns.prompt)))
                self._check_count(texts[-1], images, place)
        return texts

    def _rendered(self, chat: Chat, prompt_length: int) -> TextHalves:
        if not prompt_length:
            return TextHalves("", render(self.processor, chat))
        prompt = chat._replace(messages=chat.messages[:prompt_length])
        return TextHalves(*split_rendering(self.processor, prompt, chat.messages[prompt_length:]))

    def _check_count(self, halves: TextHalves, images: list, place: Place) -> None:
        placeholder = str(getattr(self.processor, "image_token", None) or "")
        if images and placeholder != LLAVA_PLACEHOLDER and any(LLAVA_PLACEHOLDER in half for half in halves):
            remedy = 'Write {"type": "image"} parts in its place, or remove it: images go in front of the text.'
            raise place.error(f"{LLAVA_PLACEHOLDER!r}, which is text for this processor", repr(placeholder), remedy)
        placeholders = sum(half.count(placeholder) for half in halves) if placeholder else len(images)
        if placeholders != len(images):
            remedy = (
                "Let the processor's own chat template write them."
                if self.row_type.is_chat
                else "Write one for each image."
            )
            fault = f"{len(images)} images for {placeholders} placeholders {placeholder!r} in the text"
            raise place.error(fault, "as many", remedy)

    def _closed(self, halves: TextHalves) -> TextHalves:
        """Plain text ends with the eos token, and begins with one begin token where the tokenizer writes it too."""
        tokenizer: Any = text_tokenizer(self.processor)
        written = tokenizer("").input_ids
        begin, end = tokenizer.bos_token, tokenizer.eos_token
        prompt, completion = halves
        if begin and tokenizer.bos_token_id in written:
            prompt = prompt.removeprefix(begin)
            completion = completion if prompt else completion.removeprefix(begin)
        if end and not completion.rstrip().endswith(end) and tokenizer.eos_token_id not in written:
            completion += end
        return TextHalves(prompt, completion)


AnyRows = TypeVar("AnyRows", bound=ImageRows)


class ImagePairs(ImageRows):
    """Preference pairs: the sequences of a row are its chosen and its rejected side, with the same images."""

    def turns(self, row: Row, index: int) -> list[Turns]:
        tokenizer = text_tokenizer(self.processor)  # reads image parts as they are
        pair = PairReader(tokenizer, self.row_type, self.dataset_name, tools=self.tools).pair(dict(row), index)
        prompt = pair.prompt.messages if self.row_type.is_chat else pair.prompt
        return [Turns(side, prompt, getattr(pair, side)) for side in SIDES]


@dataclass(frozen=True)
class ImagePrompts(ImageRows):
    """Prompts up to where a policy continues; a row's variables for the template go before `template_kwargs`."""

    template_kwargs: Row = field(default_factory=dict)

    def text(self, row: Row, index: int, images: list) -> str:
        """The text of a prompt, ready for the processor.

        Raises: ValueError or TypeError naming row and column.
        """
        return "".join(self.halves(row, index, images)[0])

    def own_tokens(self, ids: list[int], text: str) -> slice:
        """Which of a text's tokens are the prompt: one begin token, and no end token that the tokenizer added."""
        tokenizer = text_tokenizer(self.processor)
        _, doubled = single_begin(tokenizer, ids)
        is_closed = bool(ids) and ids[-1] == tokenizer.eos_token_id
        return slice(doubled, len(ids) - (is_closed and not text.endswith(str(tokenizer.eos_token))))

    def _rendered(self, chat: Chat, prompt_length: int) -> TextHalves:
        kwargs = {**self.template_kwargs, **chat.template_kwargs}
        return TextHalves(render_prompt(self.processor, chat._replace(template_kwargs=kwargs)), "")

    def _closed(self, halves: TextHalves) -> TextHalves:
        return halves


# ---- data sets, checked before the first step


def check_image_prompts(
    dataset: Dataset, processor: ProcessorMixin, *, name: str, template_kwargs: Row | None = None
) -> ImagePrompts:
    """How the prompts of a data set are rendered, after a check of all of its rows.

    A row has a `prompt`, text with a placeholder for each image or messages, and `images` (a list) or `image`, or
    neither.

    Raises: ValueError, TypeError or FileNotFoundError naming row, column and remedy.
    """
    columns = dataset.column_names
    if "prompt" not in columns and "input_ids" not in columns:
        raise ValueError(f"{name} dataset has columns {columns}, expected 'prompt' beside the images.")

    def read(first: Row, columns: Sequence[str], name: str) -> ImagePrompts:
        is_chat = is_list_of_dicts_with(maybe_convert_to_chatml(dict(first)).get("prompt"), "role")
        kind = "tokens" if "input_ids" in columns else "messages" if is_chat else "text"
        row_type = RowType(kind, ("input_ids" if kind == "tokens" else "prompt",))
        return ImagePrompts(processor, row_type, image_column(columns), name, template_kwargs=template_kwargs or {})

    return check_image_rows(dataset, read, name=name)


def check_image_rows(
    dataset: Dataset | IterableDataset, read: Callable[[Row, Sequence[str], str], AnyRows], *, name: str
) -> AnyRows:
    """Check all rows without decoding their images, and return their reader; the first rows are also rendered.

    `read(first row, columns, name)` makes the reader. Of a stream, and of a data set with a transform, the first rows
    only are checked here; the collator checks the others as they pass.

    Raises: ValueError, TypeError or FileNotFoundError naming row, column and remedy.
    """
    # Stored rows are what training sees.
    stored = dataset if isinstance(dataset, Dataset) and dataset.format["type"] != "custom" else None
    texts: Dataset | IterableDataset = dataset
    if stored is not None:
        texts = stored.with_format(None).remove_columns([c for c in IMAGE_COLUMNS if c in stored.column_names])
    first: Any = next(iter(texts), {} if stored else None)  # images alone make no rows of text
    if first is None:
        raise ValueError(f"{name} dataset: no rows, expected images. Check its file and filters.")
    rows = read(first, column_names(dataset), name)
    equal, seen = 0, ""
    if stored is not None:
        counts = stored_images(stored, rows.column, name=rows.dataset_name)
        rows_and_images: Any = zip(texts, ([_ANY_IMAGE] * count for count in counts), strict=True)
    else:
        seen, rows_and_images = "first ", ((row, None) for row in dataset.take(ROWS_RENDERED))
    for index, (row, images) in enumerate(rows_and_images):
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
    is_chat = rows.row_type.is_chat
    warn_of_unread_tools(dataset, rows.processor, name=rows.dataset_name, is_chat=is_chat, tools=rows.tools)
    return rows


def stored_images(dataset: Dataset, column: str | None, *, name: str) -> list[int]:
    """How many images each row of a stored data set has, read off the table without decoding them.

    Raises: TypeError for a column that `datasets` does not decode, ValueError for None, FileNotFoundError for an image
    that is a path to no file.
    """
    if column is None:
        return [0] * len(dataset)
    _check_feature(dataset.features[column], Place(name, 0, column))
    counts: list[int] = []
    for table in dataset.select_columns(column).with_format("arrow").iter(batch_size=1000):
        cells: Any = table[column]  # type: ignore[index]
        cells = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
        is_list = pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type)
        lengths = pc.list_value_length(cells).to_pylist() if is_list else [1] * len(cells)  # type: ignore[attr-defined]
        sources = iter(_sources(cells.flatten() if is_list else cells))
        for length in lengths:
            place = Place(name, len(counts), column)
            paths = [next(sources) for _ in range(length or 0)]
            if length is None or (not is_list and paths == [None]):
                raise place.error("None", EXPECTED[column], WITHOUT[column])
            for index, source in enumerate(paths):
                if source is None:
                    raise place.error(f"image {index} is None", "an image", "Leave it out of the list.")
                if source and "://" not in source and not os.path.isfile(source):
                    raise FileNotFoundError(
                        f"{place}: there is no file {source!r} (relative paths start at the working directory)."
                    )
            counts.append(length)
    return counts


def _sources(images: pa.Array) -> list[str | None]:
    """Of each stored image its path, "" where its bytes are stored, None where it is missing."""
    if not pa.types.is_struct(images.type):
        return ["" if is_valid else None for is_valid in images.is_valid().to_pylist()]
    has_bytes = pc.struct_field(images, "bytes").is_valid()  # type: ignore[attr-defined]
    return pc.if_else(has_bytes, "", pc.struct_field(images, "path")).to_pylist()  # type: ignore[attr-defined]


def _check_feature(feature: FeatureType, place: Place) -> None:
    """Raise TypeError for a column of which `datasets` does not decode images."""
    inner = feature.feature if isinstance(feature, List | LargeList) and place.column == "images" else feature
    is_empty = str(getattr(inner, "dtype", "")) == "null"
    is_list = inner is not feature or place.column == "image" or is_empty
    if not is_list or not (is_empty or (isinstance(inner, Image) and inner.decode)):
        fault = f"values of type {feature}"
        raise place.error(fault, EXPECTED[place.column], CAST[place.column], TypeError)
