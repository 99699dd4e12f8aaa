"""Rows with images as padded batches: for supervised fine-tuning, preference pairs, and prompts of a policy."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import ProcessorMixin
from transformers.data.data_collator import DataCollatorMixin

from trl.collators.preference import reference_logps
from trl.collators.rows import IGNORED, Row, check_filled
from trl.data.formats import common_prefix_length, image_column
from trl.data.image_rows import ImagePairs, ImagePrompts, ImageRows, TextHalves
from trl.data.preference_rows import SIDES, pair_row_type
from trl.data.rendering import text_tokenizer
from trl.data.tokenization import encode
from trl.data.validation import Place, sft_row_type
from trl.options.checks import check_at_least
from trl.tensors.padding import pad

logger = logging.getLogger(__name__)

# Prefix attention lets every token of these models' rows see all others, also those that it should predict.
_PREFIX_ATTENTION = ("PaliGemmaProcessor", "ColPaliProcessor")
_TOKENS = ("input_ids", "attention_mask")
# (kept tokens (B, T), positions (T,), first tokens of completions (B, 1), limit) -> kept tokens, in this order.
_LIMITS: Mapping[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "max_completion_length": lambda kept, at, start, most: kept & (at < start + most),
    "max_prompt_length": lambda kept, at, start, most: kept & (at >= start - most),
    "max_length": lambda kept, at, start, most: kept & (kept.cumsum(dim=1) <= most),
}


def check_processor(processor: object) -> None:
    """Raises ValueError or TypeError for a processor that no batch can be made with."""
    name = type(processor).__name__
    if not hasattr(processor, "image_processor"):
        raise TypeError(f"processor must have an image_processor, got {name}. Use AutoProcessor.")
    if name in _PREFIX_ATTENTION:
        raise ValueError(
            f"processor is a {name}, whose model sees the tokens it should predict. Take a causal model, or a "
            "data_collator."
        )


def processed(
    processor: Any, texts: list[str], images: Sequence[list], *, adds_special: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """What a processor makes of texts, padded on the right, and images; the positions `(B, T)` of images."""
    made = dict(
        processor(
            text=texts,
            **({"images": list(images)} if any(images) else {}),
            padding=True,
            padding_side="right",
            add_special_tokens=adds_special,
            return_mm_token_type_ids=True,
            return_tensors="pt",
        )
    )
    made.pop("labels", None)
    types = made.get("mm_token_type_ids")
    if "mm_token_type_ids" not in processor.model_input_names:
        made.pop("mm_token_type_ids", None)
    if types is not None:
        return made, types != 0
    tokens = [token for token in processor.image_token_ids if token is not None]
    return made, torch.isin(made["input_ids"], torch.tensor(tokens, dtype=made["input_ids"].dtype))


def is_per_token(name: str, value: object, batch: dict[str, Tensor]) -> bool:
    """Whether a value belongs to the tokens `(B, T, ...)`, not to images."""
    is_of_images = name.startswith(("pixel_", "image_")) and not name.endswith("token_type_ids")
    return isinstance(value, Tensor) and not is_of_images and value.shape[:2] == batch["input_ids"].shape


class PromptText(NamedTuple):
    """A prompt with a placeholder for each of its images, of whose tokens the last `length` are used."""

    text: str
    images: list
    length: int


def prompt_inputs(
    reader: ImagePrompts, prompts: Sequence[PromptText], ends: Sequence[int], width: int
) -> dict[str, Tensor]:
    """The model's inputs beside `input_ids` and `attention_mask` `(B, width)` of rows with these prompts.

    Row b's prompt ends before column `ends[b]`. Inputs per token are 0 outside of it.
    """
    texts, images = [prompt.text for prompt in prompts], [prompt.images for prompt in prompts]
    made, _ = processed(reader.processor, texts, images, adds_special=reader.adds_special)
    inputs: dict[str, Tensor] = {}
    for name, value in made.items():
        if name in _TOKENS:
            continue
        if not is_per_token(name, value, made):
            inputs[name] = value
            continue
        inputs[name] = value.new_zeros(len(prompts), width, *value.shape[2:])
        for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
            real = made["attention_mask"][row] != 0
            values = value[row][real][reader.own_tokens(made["input_ids"][row][real].tolist(), prompt.text)]
            inputs[name][row, end - prompt.length : end] = values[len(values) - prompt.length :]
    return inputs


def prompt_tokens(reader: ImagePrompts, text: str, images: list) -> tuple[list[int], list[bool]]:
    """A prompt's token ids, with those of its images, and which of them are images'."""
    made, is_image = processed(reader.processor, [text], [images], adds_special=reader.adds_special)
    ids = made["input_ids"][0].tolist()
    kept = reader.own_tokens(ids, text)
    return ids[kept], is_image[0][kept].tolist()


def image_tokens(processor: object, config: object) -> tuple[int, ...]:
    """The token ids that a model replaces by image features, sorted."""
    tokens = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
    tokens += getattr(processor, "image_token_ids", None) or []
    return tuple(sorted({int(token) for token in tokens if token is not None}))


def as_read(ids: Tensor, generated: Tensor, images: Sequence[int], *, pad: int) -> Tensor:
    """Token ids as model inputs: image tokens that the model generated, which have no image, become `pad`.

    >>> as_read(torch.tensor([9, 5, 9]), torch.tensor([False, True, True]), [9], pad=0)
    tensor([9, 5, 0])
    """
    stray = generated & torch.isin(ids, torch.tensor(list(images), dtype=ids.dtype, device=ids.device))
    return ids.masked_fill(stray, pad)


class _ImageCollator(DataCollatorMixin):
    """Base of the collators of rows with images; subclasses are dataclasses with these fields."""

    processor: ProcessorMixin
    pad_to_multiple_of: int | None
    rows_cut: int
    return_tensors = "pt"

    def __post_init__(self) -> None:
        for name in ("pad_to_multiple_of", *_LIMITS):
            check_at_least(name, getattr(self, name, None), minimum=1)
        check_processor(self.processor)

    def rows(self, first: Row, columns: Sequence[str], name: str = "") -> ImageRows:
        """The reader of rows like the first one, of a data set or (without `name`) of a batch.

        Raises: ValueError for tokens beside images, and for columns of no known type.
        """
        raise TypeError(f"{type(self).__name__} must override rows.")

    def completions_only(self, rows: ImageRows) -> bool:
        """Whether prompts are not trained."""
        return True

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Tensor]:
        """The batch of some rows, in their order.

        `input_ids`, `attention_mask`, `labels` `(B, T)`, padded on the right, and whatever else the model takes.

        Raises: ValueError or TypeError naming the row of the batch and its column, also where an image would lose
        tokens.
        """
        check_filled([()] * len(examples))
        rows = self.rows(examples[0], list(examples[0]))
        columns = SIDES if isinstance(rows, ImagePairs) else (rows.column or rows.row_type.columns[0],)
        halves, images, places = [], [], []
        for index, row in enumerate(examples):
            pictures = rows.images(row, index)
            halves += rows.halves(row, index, pictures)
            images += [pictures] * len(columns)
            places += [rows.place(index, column) for column in columns]
        texts = ["".join(half) for half in halves]
        batch, is_image = processed(self.processor, texts, images, adds_special=rows.adds_special)
        starts = torch.zeros(len(texts), dtype=torch.int64)
        if self.completions_only(rows):
            ids = [row[mask != 0] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
            starts = [
                self._start(row.tolist(), half, pictures, rows.adds_special)
                for row, half, pictures in zip(ids, halves, images, strict=True)
            ]
            starts = torch.tensor(starts)
        is_prompt = torch.arange(is_image.shape[1]) < starts[:, None]
        is_padding = batch["attention_mask"] == 0
        batch["labels"] = batch["input_ids"].masked_fill(is_image | is_padding | is_prompt, IGNORED)
        return self._cut(batch, is_image, starts[:, None], places)

    def _start(self, ids: list[int], half: TextHalves, images: list, adds_special: bool) -> int:
        """Where a row's completion begins: at the first token that the prompt alone does not have.

        Found on the text's own tokens, counted from the end, because images grow to many tokens before it.
        """
        tokenizer = text_tokenizer(self.processor)
        texts = ["".join(half), half.prompt]
        whole, prompt = tokenizer(texts, verbose=False).input_ids if adds_special else encode(tokenizer, texts)
        tail = whole[common_prefix_length(prompt, whole) :]
        start = len(ids) - len(tail)
        if ids[start:] == tail:
            return start
        # There are images in the completion: the prompt goes through the processor.
        shown = images[: half.prompt.count(str(getattr(self.processor, "image_token", "\0")))]
        alone, _ = processed(self.processor, [half.prompt], [shown], adds_special=adds_special)
        return common_prefix_length(alone["input_ids"][0].tolist(), ids)

    def _cut(
        self, batch: dict[str, Tensor], is_image: Tensor, starts: Tensor, places: list[Place]
    ) -> dict[str, Tensor]:
        """The batch without the tokens beyond the limits, none of which may be an image's, and with T rounded up."""
        mask = kept = batch["attention_mask"].bool()
        limits = {name: limit for name in _LIMITS if (limit := getattr(self, name, None)) is not None}
        for name, limit in limits.items():
            kept = _LIMITS[name](kept, torch.arange(mask.shape[1]), starts, limit)
            for row in (is_image & ~kept).any(dim=1).nonzero()[:, 0].tolist():
                raise ValueError(
                    f"{places[row]}: images of {int(is_image[row].sum())} tokens do not fit {name}={limit}. Raise it, "
                    f"or set {name}=None."
                )
        padding = getattr(text_tokenizer(self.processor), "pad_token_id", None) or 0
        fill = {"input_ids": padding, "labels": IGNORED}
        trimmed = dict(batch)
        for name, value in batch.items():
            if is_per_token(name, value, batch):
                rows = [row[stays] for row, stays in zip(value, kept, strict=True)]
                trimmed[name] = pad(rows, fill.get(name, 0), pad_to_multiple_of=self.pad_to_multiple_of)
        if cut := int((kept != mask).any(dim=1).sum()):
            if not self.rows_cut:
                logger.warning(
                    "%s cut %d of %d sequences of a batch (rows_cut counts later ones).", limits, cut, len(mask)
                )
            self.rows_cut += cut
            # The first token's label does not count: nothing predicts it.
            untrained = (trimmed["labels"][:, 1:] == IGNORED).all(dim=1).nonzero()[:, 0].tolist()
            if untrained:
                self.report_untrained([places[row] for row in untrained])
        return trimmed

    def report_untrained(self, places: list[Place]) -> None:
        """Called with the places of rows that lost all trained tokens: warns."""
        text = "%d rows of a batch have no trained token left within max_length=%s (the first: %s). Raise it."
        logger.warning(text, len(places), getattr(self, "max_length", None), places[0])


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
        >>> answer = {"role": "assistant", "content": "A cat."}  # doctest: +SKIP
        >>> collate([{"images": [image], "messages": [question, answer]}])  # doctest: +SKIP
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
            raise ValueError(f"return_tensors must be 'pt', got {self.return_tensors!r}.")

    def rows(self, first: Row, columns: Sequence[str], name: str = "") -> ImageRows:
        row_type = sft_row_type(columns, first, text_field=self.dataset_text_field, name=name or "batch")
        return ImageRows(self.processor, row_type, image_column(columns), name)

    def completions_only(self, rows: ImageRows) -> bool:
        has_completions = rows.row_type.has_completion
        if self.completion_only_loss and not has_completions:
            raise ValueError(f"completion_only_loss=True needs 'completion', got {rows.row_type.columns}.")
        return has_completions and self.completion_only_loss is not False


@dataclass
class DataCollatorForVisionPreference(_ImageCollator):
    """Batches raw rows with `images` (a list) or `image`, `chosen`, `rejected` and, unless shared, `prompt`.

    Sequence 2i is row i's prompt with the chosen completion, 2i + 1 with the rejected one, both with all of the row's
    images. The processor turns them into `input_ids`, `attention_mask`, `(2B, T)`, padded on the right, `pixel_values`
    and whatever else its model takes. `labels (2B, T)` are -100 on prompts, images and padding, and are not shifted.
    `rows (B,)` counts the rows. Columns `ref_chosen_logps` and `ref_rejected_logps` become `ref_logps (2B,)`.

    Args:
        processor: Processor with a tokenizer and an image processor.
        max_prompt_length: Longer prompts lose their start, in tokens; None: no limit. An image that would lose tokens
            is an error, here and below.
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

    def rows(self, first: Row, columns: Sequence[str], name: str = "") -> ImageRows:
        row_type = pair_row_type(columns, first, name=name or "batch")
        return ImagePairs(self.processor, row_type, image_column(columns), name, self.tools)

    def torch_call(self, examples: Sequence[Row]) -> dict[str, Tensor]:
        batch = super().torch_call(examples)
        return {"rows": torch.arange(len(examples)), **batch, **reference_logps(examples)}

    def report_untrained(self, places: list[Place]) -> None:
        """Called with the places of completions that lost all tokens, whose log-probability would be 0.

        Raises: ValueError.
        """
        raise ValueError(f"{places[0]}: the prompt fills max_length={self.max_length}. Raise it.")
