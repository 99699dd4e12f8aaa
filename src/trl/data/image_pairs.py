"""Preference pairs with images: each is two rows of prompt and completion with the same images."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin

from trl.data.formats import column_names
from trl.data.image_rows import (
    ImageRows,
    PlaceOf,
    TextHalves,
    check_every_row,
    first_texts,
    image_column,
    is_stored,
)
from trl.data.preference_rows import SIDES, PairReader, PairRowType, pair_row_type
from trl.data.rendering import Chat, text_tokenizer
from trl.data.tokenization import read_chat
from trl.data.validation import Place, SFTRowType, check_text, warn_of_unread_tools

logger = logging.getLogger(__name__)

Tools = list[dict | Callable] | None


@dataclass(frozen=True, kw_only=True)
class ImagePairReader(PairReader):
    """Reads pairs whose messages and texts have places for images."""

    place_of: PlaceOf

    def place(self, row: int, column: str) -> Place:
        return self.place_of(row, column)

    def text_of(self, row: dict[str, Any], index: int, column: str, *, may_be_empty: bool = False) -> str:
        return check_text(row.get(column), self.place(index, column), may_be_empty=may_be_empty)

    def chat_of(self, row: dict[str, Any], index: int, column: str) -> Chat:
        tokenizer = text_tokenizer(self.processing_class)  # leaves image parts as they are
        return read_chat(tokenizer, row, self.place(index, column), tools=self.tools)


class ImagePairs:
    """Renders pairs of one type, chosen and rejected alike; `place` names a row in errors."""

    def __init__(
        self,
        processor: ProcessorMixin,
        row_type: PairRowType,
        column: str | None,
        place: PlaceOf,
        *,
        tools: Tools = None,
    ) -> None:
        self.column, self.place = column, place
        self.is_conversational = row_type.kind == "messages"
        self.equal_rows = 0  # of those checked: rows whose two completions are the same
        self._reader = ImagePairReader(processor, row_type, "", tools=tools, place_of=place)
        sft_type = SFTRowType("prompt_completion", ("prompt", "completion"), self.is_conversational)
        self._sides = {
            side: ImageRows(processor, sft_type, column, lambda index, name, side=side: place(index, side if name == "completion" else name))
            for side in SIDES
        }  # fmt: skip

    def halves(self, row: Mapping[str, Any], index: int, images: list[Any]) -> list[TextHalves]:
        """The texts of the chosen and the rejected side of a row, ready for the processor.

        Raises: ValueError or TypeError naming row and column.
        """
        rows = self._rows(row, index)
        return [self._sides[side].halves(rows[side], index, images) for side in SIDES]

    def check(self, row: Mapping[str, Any], index: int, images: list[Any], *, is_rendered: bool) -> None:
        """Raise what `halves` raises; what only rendering shows is left out unless `is_rendered`."""
        rows = self._rows(row, index)
        for side in SIDES:
            self._sides[side].check(rows[side], index, images, is_rendered=is_rendered)
        self.equal_rows += rows["chosen"] == rows["rejected"]

    def _rows(self, row: Mapping[str, Any], index: int) -> dict[str, dict[str, Any]]:
        """A row of prompt and completion for each side."""
        if not self.is_conversational:
            text = self._reader.text(dict(row), index)
            return {side: {"prompt": text.prompt, "completion": getattr(text, side)} for side in SIDES}
        pair = self._reader.chat(dict(row), index)
        shared = {
            "prompt": pair.prompt.messages,
            "tools": pair.prompt.tools,
            "chat_template_kwargs": pair.prompt.template_kwargs,
        }
        return {side: {**shared, "completion": getattr(pair, side)} for side in SIDES}


def image_pair_type(columns: list[str], row: Mapping[str, Any], *, name: str) -> PairRowType:
    """The type of pairs with images.

    Raises: ValueError for tokens, in which an image has no place any more, and for columns of no known type.
    """
    row_type = pair_row_type(columns, row, name=name)
    if row_type.kind == "tokens":
        raise ValueError(
            f"{name} dataset, row 0, column {row_type.columns[0]!r}: tokens beside images, expected text or messages. "
            "Remove the columns of tokens: the processor makes them together with the images."
        )
    return row_type


def check_pair_image_rows(
    dataset: Dataset | IterableDataset, processor: ProcessorMixin, *, name: str, tools: Tools = None
) -> PairRowType:
    """Check every pair of a data set with images as `check_every_row` does, and return the type of the rows.

    Rows whose two completions are equal, which teach nothing, are counted in a warning.

    Raises: ValueError, TypeError or FileNotFoundError naming row, column and remedy.
    """
    columns = column_names(dataset)
    column = image_column(columns)
    row_type = image_pair_type(columns, first_texts(dataset, column, name=name), name=name)
    pairs = ImagePairs(processor, row_type, column, lambda row, of: Place(name, row, of), tools=tools)
    check_every_row(dataset, pairs.check, column, name=name)
    is_chat = row_type.kind == "messages"
    warn_of_unread_tools(dataset, processor, name=name, is_chat=is_chat, tools=tools)
    if pairs.equal_rows:
        seen = "" if is_stored(dataset) else "first "
        logger.warning(
            "%s dataset: in %d of the %srows 'chosen' equals 'rejected', which teaches nothing. Filter them out.",
            name,
            pairs.equal_rows,
            seen,
        )
    return row_type
