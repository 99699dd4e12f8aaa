"""Texts and images as padded batches, made by a model's processor."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import ProcessorMixin
from transformers.data.data_collator import DataCollatorMixin

from trl.collators.rows import IGNORED, check_multiple, round_up
from trl.data.formats import common_prefix_length
from trl.data.image_prompts import ImagePrompts
from trl.data.image_rows import TextHalves
from trl.data.rendering import text_tokenizer
from trl.data.tokenization import encode
from trl.data.validation import Place

logger = logging.getLogger(__name__)

# Prefix attention lets every token of these models' rows see all others, also those that it should predict.
_PREFIX_ATTENTION = ("PaliGemmaProcessor", "ColPaliProcessor")


class Illustrated(NamedTuple):
    """The sequences of a batch: texts, images, and their rows."""

    halves: list[TextHalves]
    images: list[list[Any]]
    places: list[Place]
    adds_special: bool  # whether the tokenizer adds special tokens; a chat template has written them already


class Limits(NamedTuple):
    """Longest prompt (which loses its start), completion and sequence (which lose their end), in tokens; None: no limit."""

    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    max_length: int | None = None

    def check(self) -> None:
        """Raises ValueError for a limit below 1."""
        for name, limit in self._asdict().items():
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be >= 1, got {limit}. Use None for no limit.")

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


class ImageCollator(DataCollatorMixin):
    """Base of the collators of rows with images; subclasses are dataclasses with these fields."""

    processor: ProcessorMixin
    pad_to_multiple_of: int | None
    rows_cut: int
    return_tensors = "pt"

    @property
    def limits(self) -> Limits:
        """The lengths at which sequences are cut."""
        raise AssertionError("subclasses define it")

    def check(self) -> None:
        """Raises ValueError or TypeError for settings and processors that no batch can be made with."""
        check_multiple(self.pad_to_multiple_of)
        self.limits.check()
        check_processor(self.processor)

    def collate(self, sequences: Illustrated, *, completions_only: bool) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask`, `labels` `(B, T)`, padded on the right, and whatever else the model takes.

        Raises: ValueError naming the place where an image would lose tokens.
        """
        texts = ["".join(half) for half in sequences.halves]
        batch, is_image = processed(
            self.processor, texts, sequences.images, adds_special=sequences.adds_special
        )
        starts = torch.zeros(len(texts), dtype=torch.int64)
        if completions_only:
            starts = torch.tensor(self._completion_starts(batch, sequences))
        is_prompt = torch.arange(is_image.shape[1]) < starts[:, None]
        is_padding = batch["attention_mask"] == 0
        batch["labels"] = batch["input_ids"].masked_fill(is_image | is_padding | is_prompt, IGNORED)
        return self._rounded(self._cut(batch, is_image, starts, sequences.places))

    def _completion_starts(self, batch: dict[str, Tensor], sequences: Illustrated) -> list[int]:
        """Where each completion begins: at the first token that the prompt alone does not have.

        Found on the text's own tokens, counted from the end, because images grow to many tokens before it.
        """
        tokenizer: Any = text_tokenizer(self.processor)
        placeholder = str(getattr(self.processor, "image_token", "\0"))
        starts = []
        for index, half in enumerate(sequences.halves):
            ids = batch["input_ids"][index][batch["attention_mask"][index] != 0].tolist()
            whole, prompt = (
                _encode(tokenizer, text, sequences.adds_special) for text in ("".join(half), half.prompt)
            )
            tail = whole[common_prefix_length(prompt, whole) :]
            start = len(ids) - len(tail)
            if ids[start:] != tail:  # images in the completion: the prompt goes through the processor
                shown = sequences.images[index][: half.prompt.count(placeholder)]
                alone, _ = processed(
                    self.processor, [half.prompt], [shown], adds_special=sequences.adds_special
                )
                start = common_prefix_length(alone["input_ids"][0].tolist(), ids)
            starts.append(start)
        return starts

    def _cut(
        self, batch: dict[str, Tensor], is_image: Tensor, starts: Tensor, places: list[Place]
    ) -> dict[str, Tensor]:
        """The batch without the tokens beyond the limits, none of which may be an image's."""
        mask = batch["attention_mask"].bool()
        kept = mask
        for name, kept in self.limits.kept(mask, starts):
            for row in (is_image & ~kept).any(dim=1).nonzero()[:, 0].tolist():
                raise ValueError(
                    f"{places[row]}: {int(mask[row].sum())} tokens, of which {int(is_image[row].sum())} are its images', do "
                    f"not fit {name}={getattr(self.limits, name)}, and an image cannot lose tokens. Set {name}=None, raise "
                    "it, or give smaller or fewer images."
                )
        if torch.equal(kept, mask):
            return batch
        lengths = kept.sum(dim=1)
        order = kept.int().argsort(dim=1, descending=True, stable=True)[:, : int(lengths.max())]
        is_filler = torch.arange(order.shape[1]) >= lengths[:, None]
        rows = torch.arange(len(order))[:, None]
        shorter = {
            name: value[rows, order].masked_fill(
                is_filler.view(*is_filler.shape, *[1] * (value.ndim - 2)), self._fill(name)
            )
            if is_per_token(name, value, batch)
            else value
            for name, value in batch.items()
        }
        self._report_cut(int((kept != mask).any(dim=1).sum()), len(order))
        self.check_cut(shorter["labels"], places)
        return shorter

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
        untrained = int(untrained_rows(labels).sum())
        if untrained:
            logger.warning(
                "%d of %d rows of a batch have no trained token left within max_length=%s. Raise it.",
                untrained,
                len(labels),
                self.limits.max_length,
            )

    def _rounded(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with T rounded up to `pad_to_multiple_of`."""
        width = batch["input_ids"].shape[1]
        missing = round_up(width, self.pad_to_multiple_of) - width
        if not missing:
            return batch
        return {
            name: pad(value, (0, 0) * (value.ndim - 2) + (0, missing), value=self._fill(name))
            if is_per_token(name, value, batch)
            else value
            for name, value in batch.items()
        }

    def _fill(self, name: str) -> int:
        """What a tensor `(B, T, ...)` of this name holds on padding."""
        if name == "input_ids":
            return getattr(text_tokenizer(self.processor), "pad_token_id", None) or 0
        return IGNORED if name == "labels" else 0


def check_processor(processor: Any) -> None:
    """Raises ValueError or TypeError for a processor that no batch can be made with."""
    name = type(processor).__name__
    if not hasattr(processor, "image_processor"):
        raise TypeError(
            f"processor must have an image_processor, got {name}. Load it with AutoProcessor.from_pretrained."
        )
    if name in _PREFIX_ATTENTION:
        raise ValueError(
            f"processor is a {name}, whose model lets tokens see those they should predict, expected one of a causal "
            "model. Take another model, or, with SFTTrainer and DPOTrainer, a data_collator of your own that passes the processor "
            "a suffix."
        )


def processed(
    processor: Any, texts: list[str], images: Sequence[list[Any]], *, adds_special: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """What a processor makes of texts, padded on the right, and their images; and which positions `(B, T)` are images'."""
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
    known = [token for token in processor.image_token_ids if token is not None]
    return made, torch.isin(made["input_ids"], torch.tensor(known, dtype=made["input_ids"].dtype))


def untrained_rows(labels: Tensor) -> Tensor:
    """Which rows `(B,)` have no label that an earlier token predicts."""
    return (labels[:, 1:] == IGNORED).all(dim=1)


def is_per_token(name: str, value: Any, batch: dict[str, Tensor]) -> bool:
    """Whether a value belongs to the tokens `(B, T, ...)`, not to images."""
    is_of_images = name.startswith(("pixel_", "image_")) and not name.endswith("token_type_ids")
    return isinstance(value, Tensor) and not is_of_images and value.shape[:2] == batch["input_ids"].shape


def _encode(tokenizer: Any, text: str, adds_special: bool) -> list[int]:
    """Token ids of a text that something may follow."""
    if not adds_special:
        return encode(tokenizer, [text])[0]
    return tokenizer(text, verbose=False).input_ids


# ---- prompts with images

_TOKENS = ("input_ids", "attention_mask")


class PromptText(NamedTuple):
    """A prompt with a placeholder for each of its images, of whose tokens the last `length` are used."""

    text: str
    images: list[Any]
    length: int


def prompt_inputs(
    reader: ImagePrompts, prompts: Sequence[PromptText], ends: Sequence[int], width: int
) -> dict[str, Tensor]:
    """The model's inputs beside `input_ids` and `attention_mask` `(B, width)` of rows with these prompts.

    Row b's prompt ends before column `ends[b]`. Inputs per token are 0 outside of it.
    """
    texts, images = [prompt.text for prompt in prompts], [prompt.images for prompt in prompts]
    made, _ = processed(reader.processor, texts, images, adds_special=reader.adds_special)
    found: dict[str, Tensor] = {}
    for name, value in made.items():
        if name in _TOKENS:
            continue
        if not is_per_token(name, value, made):
            found[name] = value
            continue
        found[name] = value.new_zeros(len(prompts), width, *value.shape[2:])
        for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
            real = made["attention_mask"][row] != 0
            own = value[row][real][reader.own_tokens(made["input_ids"][row][real].tolist(), prompt.text)]
            found[name][row, end - prompt.length : end] = own[len(own) - prompt.length :]
    return found


def prompt_tokens(reader: ImagePrompts, text: str, images: list[Any]) -> tuple[list[int], list[bool]]:
    """A prompt's token ids, with those of its images, and which of them are images'."""
    made, is_image = processed(reader.processor, [text], [images], adds_special=reader.adds_special)
    ids = made["input_ids"][0].tolist()
    own = reader.own_tokens(ids, text)
    return ids[own], is_image[0][own].tolist()


def image_tokens(processor: Any, config: Any) -> tuple[int, ...]:
    """The token ids that a model replaces by image features, sorted."""
    known = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
    known += getattr(processor, "image_token_ids", None) or []
    return tuple(sorted({int(token) for token in known if token is not None}))


def as_read(ids: Tensor, generated: Tensor, images: Sequence[int], *, pad: int) -> Tensor:
    """Token ids as model inputs: image tokens that the model generated, which have no image, become `pad`.

    >>> as_read(torch.tensor([9, 5, 9]), torch.tensor([False, True, True]), [9], pad=0)
    tensor([9, 5, 0])
    """
    stray = generated & torch.isin(ids, torch.tensor(list(images), dtype=ids.dtype, device=ids.device))
    return ids.masked_fill(stray, pad)
