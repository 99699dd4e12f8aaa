"""Rows with images as padded batches: for supervised fine-tuning, and preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import ProcessorMixin

from trl.collators.images import Illustrated, ImageCollator, Limits, untrained_rows
from trl.collators.preference import reference_logps
from trl.collators.rows import Row, check_not_empty
from trl.data.image_pairs import ImagePairs, image_pair_type
from trl.data.image_rows import ImageRows, image_column, image_row_type, read_images
from trl.data.preference_rows import SIDES
from trl.data.validation import Place


@dataclass
class DataCollatorForVisionLanguageModeling(ImageCollator):
    """Batches raw rows with `images` (a list) or `image`, and `messages`, `prompt` with `completion`, or text.

    Conversations get exactly what the processor's chat template writes; plain text must hold the processor's
    placeholder for each image, and gets the tokenizer's special tokens and an eos token. The processor turns texts and
    images into `input_ids`, `attention_mask`, `(B, T)`, padded on the right, `pixel_values` and whatever else its model
    takes. `labels (B, T)` are -100 on padding, on images, and on prompts where completions only are trained. Labels are
    not shifted.

    Args:
        processor: Processor with a tokenizer and an image processor.
        max_length: Rows lose their end beyond this many tokens, those of the images counted; None: no limit. An
            image that would lose tokens is an error.
        completion_only_loss: Whether rows of `prompt` and `completion` train the completion only; None: likewise, and
            rows without completion are trained whole.
        pad_to_multiple_of: Rounds T up to a multiple, in tokens.
        dataset_text_field: Column of plain text.
        return_tensors: Only "pt".

    Example:
        >>> collate = DataCollatorForVisionLanguageModeling(processor)  # doctest: +SKIP
        >>> question = {"role": "user", "content": "What is it?"}  # doctest: +SKIP
        >>> collate([{"images": [image], "messages": [question, {"role": "assistant", "content": "A cat."}]}])  # doctest: +SKIP
    """

    processor: ProcessorMixin
    max_length: int | None = None
    completion_only_loss: bool | None = False
    pad_to_multiple_of: int | None = None
    dataset_text_field: str = "text"
    return_tensors: str = "pt"
    rows_cut: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.return_tensors != "pt":
            raise ValueError(
                f"return_tensors must be 'pt', got {self.return_tensors!r}. Only torch is supported."
            )
        self.check()

    @property
    def limits(self) -> Limits:
        """Rows lose their end."""
        return Limits(max_length=self.max_length)

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Tensor]:
        """The batch of some rows, in their order.

        Raises: ValueError or TypeError naming the row of the batch and its column.
        """
        check_not_empty(examples)
        rows = self._rows(examples[0])
        places: list[Place] = [
            Place("", index, rows.column or rows.row_type.columns[0]) for index in range(len(examples))
        ]
        images = [read_images(row, rows.column, place) for row, place in zip(examples, places, strict=True)]
        halves = [rows.halves(row, index, images[index]) for index, row in enumerate(examples)]
        sequences = Illustrated(halves, images, places, adds_special=not rows.row_type.is_conversational)
        return self.collate(sequences, completions_only=self._completions_only(rows))

    def _rows(self, first: Row) -> ImageRows:
        column = image_column(list(first))
        row_type = image_row_type(list(first), first, text_field=self.dataset_text_field, name="batch")
        return ImageRows(self.processor, row_type, column, lambda row, column: Place("", row, column))

    def _completions_only(self, rows: ImageRows) -> bool:
        has_completions = rows.row_type.kind == "prompt_completion"
        if self.completion_only_loss and not has_completions:
            raise ValueError(
                f"row 0 of the batch, column {rows.row_type.columns[0]!r}: completion_only_loss=True, but the row has no "
                "completion. Give 'prompt' and 'completion' columns, or set completion_only_loss=False."
            )
        return has_completions and self.completion_only_loss is not False


@dataclass
class DataCollatorForVisionPreference(ImageCollator):
    """Batches raw rows with `images` (a list) or `image`, `chosen`, `rejected` and, unless both begin with it, `prompt`.

    Sequence 2i is row i's prompt with the chosen completion, 2i + 1 with the rejected one, both with all of the row's
    images. The processor turns them into `input_ids`, `attention_mask`, `(2B, T)`, padded on the right, `pixel_values`
    and whatever else its model takes. `labels (2B, T)` are -100 on prompts, images and padding, and are not shifted.
    `rows (B,)` counts the rows. Columns `ref_chosen_logps` and `ref_rejected_logps` become `ref_logps (2B,)`.

    Args:
        processor: Processor with a tokenizer and an image processor.
        max_prompt_length: Longer prompts lose their start, in tokens; None: no limit. An image that would lose tokens is
            an error, here and below.
        max_completion_length: Longer completions lose their end.
        max_length: Sequences lose their end beyond this many tokens, those of the images counted.
        pad_to_multiple_of: Rounds T up to a multiple, in tokens.
        tools: Tools that the chat template shows, instead of those in the rows' column `tools`.

    Example:
        >>> collate = DataCollatorForVisionPreference(processor)  # doctest: +SKIP
        >>> question = [{"role": "user", "content": "What is it?"}]  # doctest: +SKIP
        >>> good, bad = ([{"role": "assistant", "content": text}] for text in ("A cat.", "A dog."))  # doctest: +SKIP
        >>> collate([{"images": [image], "prompt": question, "chosen": good, "rejected": bad}])  # doctest: +SKIP
    """

    processor: ProcessorMixin
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    tools: list[dict | Callable] | None = None
    rows_cut: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.check()

    @property
    def limits(self) -> Limits:
        """Prompts lose their start, completions their end."""
        return Limits(self.max_prompt_length, self.max_completion_length, self.max_length)

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Tensor]:
        """The batch of some rows, in their order.

        Raises: ValueError or TypeError naming the row of the batch and its column.
        """
        check_not_empty(examples)
        pairs = self._pairs(examples[0])
        halves, images, places = [], [], []
        for index, row in enumerate(examples):
            own = read_images(row, pairs.column, pairs.place(index, pairs.column or ""))
            halves += pairs.halves(row, index, own)
            images += [own, own]
            places += [pairs.place(index, side) for side in SIDES]
        sequences = Illustrated(halves, images, places, adds_special=not pairs.is_conversational)
        batch = self.collate(sequences, completions_only=True)
        return {"rows": torch.arange(len(examples)), **batch, **reference_logps(examples)}

    def _pairs(self, first: Row) -> ImagePairs:
        columns = list(first)
        row_type = image_pair_type(columns, first, name="batch")
        return ImagePairs(
            self.processor,
            row_type,
            image_column(columns),
            lambda row, column: Place("", row, column),
            tools=self.tools,
        )

    def check_cut(self, labels: Tensor, places: list[Place]) -> None:
        """Called with the labels `(2B, T)` of a batch of which something was cut.

        Raises: ValueError where nothing is left of a completion, whose log-probability would be 0.
        """
        for row in untrained_rows(labels).nonzero()[:, 0].tolist():
            raise ValueError(
                f"{places[row]}: the prompt leaves no token of the completion within max_length={self.max_length}, expected "
                "at least 1. Raise max_length, or set max_prompt_length lower or the row aside."
            )
