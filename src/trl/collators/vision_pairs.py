"""Preference pairs with images, as a padded batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import ProcessorMixin

from trl.collators.images import (
    Illustrated,
    ImageCollator,
    Limits,
    check_examples,
    untrained_rows,
)
from trl.collators.preference import reference_logps
from trl.collators.rows import Row
from trl.data.image_pairs import ImagePairs, image_pair_type
from trl.data.image_rows import image_column, read_images
from trl.data.preference_rows import SIDES
from trl.data.validation import Place


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
        check_examples(examples)
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
