"""Rows with images as padded batches: for supervised fine-tuning, and preference pairs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import ProcessorMixin
from transformers.data.data_collator import DataCollatorMixin

from trl.collators.images import check_processor, is_per_token, processed
from trl.collators.preference import reference_logps
from trl.collators.rows import IGNORED, Row, check_multiple, check_not_empty, round_up
from trl.data.formats import common_prefix_length
from trl.data.image_rows import ImagePairs, ImageRows, TextHalves, image_pairs, image_rows
from trl.data.preference_rows import SIDES
from trl.data.rendering import text_tokenizer
from trl.data.tokenization import encode
from trl.data.validation import Place

logger = logging.getLogger(__name__)


class Limits(NamedTuple):
    """Longest prompt (which loses its start), completion and sequence (which lose their end), in tokens; None: no limit."""

    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    max_length: int | None = None

    def kept(self, mask: Tensor, starts: Tensor) -> Iterator[tuple[str, Tensor]]:
        """After each limit that is set: its name, and which tokens `(B, T)` are left of those in `mask`.

        `starts (B,)` are the positions of the completions' first tokens.

        >>> limits = Limits(max_completion_length=1, max_length=2)
        >>> for name, kept in limits.kept(torch.ones(1, 4, dtype=torch.bool), torch.tensor([2])):
        ...     print(name, kept.int().tolist())
        max_completion_length [[1, 1, 1, 0]]
        max_length [[1, 1, 0, 0]]
        """
        positions = torch.arange(mask.shape[1])
        kept = mask.bool()
        if self.max_completion_length is not None:
            kept = kept & (positions < starts[:, None] + self.max_completion_length)
            yield "max_completion_length", kept
        if self.max_prompt_length is not None:
            kept = kept & (positions >= starts[:, None] - self.max_prompt_length)
            yield "max_prompt_length", kept
        if self.max_length is not None:
            kept = kept & (kept.cumsum(dim=1) <= self.max_length)
            yield "max_length", kept


class _ImageCollator(DataCollatorMixin):
    """Base of the collators of rows with images; subclasses are dataclasses with these fields."""

    processor: ProcessorMixin
    pad_to_multiple_of: int | None
    rows_cut: int
    return_tensors = "pt"

    def __post_init__(self) -> None:
        check_multiple(self.pad_to_multiple_of)
        for name, limit in self.limits._asdict().items():
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be >= 1, got {limit}. Use None for no limit.")
        check_processor(self.processor)

    @property
    def limits(self) -> Limits:
        """The lengths at which sequences are cut."""
        return Limits(**{name: getattr(self, name, None) for name in Limits._fields})

    def rows(self, first: Row) -> ImageRows:
        """Reads rows like the first one of a batch."""
        raise TypeError(f"{type(self).__name__} must override rows.")

    def completions_only(self, rows: ImageRows) -> bool:
        """Whether prompts are not trained."""
        return True

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Tensor]:
        """The batch of some rows, in their order.

        `input_ids`, `attention_mask`, `labels` `(B, T)`, padded on the right, and whatever else the model takes.

        Raises: ValueError or TypeError naming the row of the batch and its column, also where an image would lose tokens.
        """
        check_not_empty(examples)
        rows = self.rows(examples[0])
        columns = SIDES if isinstance(rows, ImagePairs) else (rows.column or rows.row_type.columns[0],)
        halves, images, places = [], [], []
        for index, row in enumerate(examples):
            own = rows.images(row, index)
            halves += rows.halves(row, index, own)
            images += [own] * len(columns)
            places += [rows.place(index, column) for column in columns]
        texts = ["".join(half) for half in halves]
        batch, is_image = processed(self.processor, texts, images, adds_special=rows.adds_special)
        starts = torch.zeros(len(texts), dtype=torch.int64)
        if self.completions_only(rows):
            starts = torch.tensor(
                self._completion_starts(batch, halves, images, adds_special=rows.adds_special)
            )
        is_prompt = torch.arange(is_image.shape[1]) < starts[:, None]
        is_padding = batch["attention_mask"] == 0
        batch["labels"] = batch["input_ids"].masked_fill(is_image | is_padding | is_prompt, IGNORED)
        return self._cut(batch, is_image, starts, places)

    def _completion_starts(
        self,
        batch: dict[str, Tensor],
        halves: Sequence[TextHalves],
        images: Sequence[list[Any]],
        *,
        adds_special: bool,
    ) -> list[int]:
        """Where each completion begins: at the first token that the prompt alone does not have.

        Found on the text's own tokens, counted from the end, because images grow to many tokens before it.
        """
        tokenizer: Any = text_tokenizer(self.processor)
        placeholder = str(getattr(self.processor, "image_token", "\0"))
        starts = []
        for index, half in enumerate(halves):
            ids = batch["input_ids"][index][batch["attention_mask"][index] != 0].tolist()
            texts = ["".join(half), half.prompt]
            whole, prompt = (
                tokenizer(texts, verbose=False).input_ids if adds_special else encode(tokenizer, texts)
            )
            tail = whole[common_prefix_length(prompt, whole) :]
            start = len(ids) - len(tail)
            if ids[start:] != tail:  # images in the completion: the prompt goes through the processor
                shown = images[index][: half.prompt.count(placeholder)]
                alone, _ = processed(self.processor, [half.prompt], [shown], adds_special=adds_special)
                start = common_prefix_length(alone["input_ids"][0].tolist(), ids)
            starts.append(start)
        return starts

    def _cut(
        self, batch: dict[str, Tensor], is_image: Tensor, starts: Tensor, places: list[Place]
    ) -> dict[str, Tensor]:
        """The batch without the tokens beyond the limits, none of which may be an image's, and with T rounded up."""
        mask = batch["attention_mask"].bool()
        kept = mask
        for name, kept in self.limits.kept(mask, starts):
            for row in (is_image & ~kept).any(dim=1).nonzero()[:, 0].tolist():
                raise ValueError(
                    f"{places[row]}: {int(mask[row].sum())} tokens, of which {int(is_image[row].sum())} are its images', do "
                    f"not fit {name}={getattr(self.limits, name)}, and an image cannot lose tokens. Set {name}=None, raise "
                    "it, or give smaller or fewer images."
                )
        lengths = kept.sum(dim=1)
        width = round_up(int(lengths.max()), self.pad_to_multiple_of)
        missing = max(width - mask.shape[1], 0)
        order = pad(kept, (0, missing)).int().argsort(dim=1, descending=True, stable=True)[:, :width]
        is_filler = torch.arange(width) >= lengths[:, None]
        rows = torch.arange(len(order))[:, None]
        found = dict(batch)
        for name, value in batch.items():
            if is_per_token(name, value, batch):
                more = (0, 0) * (value.ndim - 2)
                longer = pad(value, (*more, 0, missing))[rows, order]
                fillers = is_filler.view(*is_filler.shape, *[1] * (value.ndim - 2))
                found[name] = longer.masked_fill(fillers, self._fill(name))
        if cut := int((kept != mask).any(dim=1).sum()):
            self._report_cut(cut, len(order))
            self.check_cut(found["labels"], places)
        return found

    def _report_cut(self, cut: int, rows: int) -> None:
        if not self.rows_cut:
            limits = ", ".join(f"{name}={limit}" for name, limit in self.limits._asdict().items() if limit)
            logger.warning(
                "%s cuts %d of the %d sequences of a batch, and maybe later ones (rows_cut counts them). Set None to keep "
                "them whole.",
                limits,
                cut,
                rows,
            )
        self.rows_cut += cut

    def check_cut(self, labels: Tensor, places: list[Place]) -> None:
        """Called with the labels `(B, T)` of a batch of which something was cut: warns where none is left of a row."""
        untrained = int(_untrained(labels).sum())
        if untrained:
            logger.warning(
                "%d of %d rows of a batch have no trained token left within max_length=%s. Raise it.",
                untrained,
                len(labels),
                self.limits.max_length,
            )

    def _fill(self, name: str) -> int:
        """What a tensor `(B, T, ...)` of this name holds on padding."""
        if name == "input_ids":
            return getattr(text_tokenizer(self.processor), "pad_token_id", None) or 0
        return IGNORED if name == "labels" else 0


def _untrained(labels: Tensor) -> Tensor:
    """Which rows `(B,)` have no label that an earlier token predicts."""
    return (labels[:, 1:] == IGNORED).all(dim=1)


@dataclass
class DataCollatorForVisionLanguageModeling(_ImageCollator):
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
        super().__post_init__()
        if self.return_tensors != "pt":
            raise ValueError(
                f"return_tensors must be 'pt', got {self.return_tensors!r}. Only torch is supported."
            )

    def rows(self, first: Row) -> ImageRows:
        return image_rows(first, list(first), self.processor, text_field=self.dataset_text_field)

    def completions_only(self, rows: ImageRows) -> bool:
        has_completions = rows.row_type.has_completion
        if self.completion_only_loss and not has_completions:
            raise ValueError(
                f"row 0 of the batch, column {rows.row_type.columns[0]!r}: completion_only_loss=True, but the row has no "
                "completion. Give 'prompt' and 'completion' columns, or set completion_only_loss=False."
            )
        return has_completions and self.completion_only_loss is not False


@dataclass
class DataCollatorForVisionPreference(_ImageCollator):
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

    def rows(self, first: Row) -> ImageRows:
        return image_pairs(first, list(first), self.processor, tools=self.tools)

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Tensor]:
        """The batch of some rows, in their order; raises as the other collator does."""
        batch = super().torch_call(examples)
        return {"rows": torch.arange(len(examples)), **batch, **reference_logps(examples)}

    def check_cut(self, labels: Tensor, places: list[Place]) -> None:
        """Called with the labels `(2B, T)` of a batch of which something was cut.

        Raises: ValueError where nothing is left of a completion, whose log-probability would be 0.
        """
        for row in _untrained(labels).nonzero()[:, 0].tolist():
            raise ValueError(
                f"{places[row]}: the prompt leaves no token of the completion within max_length={self.max_length}, expected "
                "at least 1. Raise max_length, or set max_prompt_length lower or the row aside."
            )
