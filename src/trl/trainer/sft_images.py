"""Supervised fine-tuning on rows with images: what is checked before the first step; the rows stay as they are."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.collators.vision import DataCollatorForVisionLanguageModeling
from trl.data.formats import column_names
from trl.data.image_checks import check_image_rows
from trl.data.validation import check_sft_settings
from trl.models.parts import causal_core, embedded_tokens
from trl.models.setup import check_positions
from trl.trainer.sft_config import SFTConfig

# The columns of raw rows that the collator reads.
RAW_COLUMNS = (
    "images", "image", "messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs",
)  # fmt: skip


def collator_for_images(
    given: Any,
    args: SFTConfig,
    processing_class: Any,
    model: Any,
    formatting_func: Callable[..., Any] | None,
) -> Any:
    """The collator of rows with images: the given one, which may read them in any way, or the default one.

    Raises: ValueError, TypeError or ImportError for what these rows cannot be trained with, saying what to change.
    """
    _check_settings(args, formatting_func)
    if is_foreign(given, DataCollatorForVisionLanguageModeling, of_text=(DataCollatorForLanguageModeling,)):
        return given
    check_parts(processing_class, model)
    return given or DataCollatorForVisionLanguageModeling(
        processing_class,
        max_length=args.max_length,
        completion_only_loss=args.completion_only_loss,
        pad_to_multiple_of=args.pad_to_multiple_of,
        dataset_text_field=args.dataset_text_field,
    )


def is_foreign(given: Any, ours: type, *, of_text: tuple[type, ...]) -> bool:
    """Whether a data_collator is the user's own, which may read rows in any way.

    Raises: TypeError for one of ours that reads tokens only.
    """
    if isinstance(given, of_text):
        raise TypeError(
            f"data_collator is a {type(given).__name__}, which drops the images of the rows. Leave it out, give a "
            f"{ours.__name__}, or remove the column of images to train on text."
        )
    return given is not None and not isinstance(given, ours)


def check_parts(processing_class: Any, model: Any) -> None:
    """Raises ImportError, TypeError or ValueError where Pillow, a processor or a vision-language model is missing."""
    if importlib.util.find_spec("PIL") is None:
        raise ImportError("rows with images need Pillow. Install it with: pip install 'trl[vlm]'")
    if not isinstance(processing_class, ProcessorMixin) or not hasattr(processing_class, "image_processor"):
        raise TypeError(
            f"processing_class is a {type(processing_class).__name__}, but the rows have images, expected a processor. "
            "Load it with AutoProcessor.from_pretrained, or remove the column of images to train on text."
        )
    core = causal_core(model)
    if "pixel_values" not in inspect.signature(type(core).forward).parameters:
        raise ValueError(
            f"model is a {type(core).__name__}, which takes no images, but the rows have some, expected a vision-language "
            "model. Load one with AutoModelForImageTextToText, or remove the column of images to train on text."
        )


def _check_settings(args: SFTConfig, formatting_func: Callable[..., Any] | None) -> None:
    refuse_settings(args, _REFUSED)
    if formatting_func is not None:
        raise ValueError(
            "formatting_func was given with rows of images, expected None: the processor needs messages or texts beside "
            "the images. Map the rows to 'messages', or to 'prompt' and 'completion', before training."
        )
    unused = sorted(set(args.dataset_kwargs or {}) - {"skip_prepare_dataset"})
    if unused:
        raise ValueError(
            f"dataset_kwargs has {unused}, expected skip_prepare_dataset only: rows with images are made into tokens in "
            "the data collator. Leave them out."
        )


def refuse_settings(args: Any, refused: Mapping[str, str]) -> None:
    """Raise ValueError for a setting that is True and, for the reason given, cannot be with rows of images."""
    for name, why in refused.items():
        if getattr(args, name) is True:
            raise ValueError(f"{name}=True with rows of images, expected False: {why}. Set {name}=False.")


_REFUSED = {
    "packing": "an image belongs to its row, and rows with images are padded",
    "eval_packing": "an image belongs to its row, and rows with images are padded",
    "padding_free": "rows with images are padded",
    "assistant_only_loss": "the assistant's tokens are not told apart beside images; 'prompt' and 'completion' columns "
    "train the completion only",
}


def check_rows(
    dataset: Dataset | IterableDataset,
    collator: DataCollatorForVisionLanguageModeling,
    model: Any,
    *,
    name: str,
) -> None:
    """Check the rows of a data set, and try the first one: its batch must be one that this model can take.

    Raises: ValueError, TypeError or FileNotFoundError naming row, column and remedy.
    """
    row_type = check_image_rows(
        dataset, collator.processor, text_field=collator.dataset_text_field, name=name
    )
    check_sft_settings(
        row_type,
        name=name,
        columns=column_names(dataset),
        assistant_only_loss=False,
        completion_only_loss=collator.completion_only_loss or None,
        is_formatted=False,
    )
    try_first_row(dataset, collator, model, name=name)


def try_first_row(dataset: Any, collator: Any, model: Any, *, name: str) -> None:
    """Make a batch of the first row, which must be one that this model can take.

    Raises: ValueError naming what does not belong to the model.
    """
    batch = copy.copy(collator)([next(iter(dataset))])  # a copy: the trial does not count in rows_cut
    ids = batch["input_ids"]
    check_positions(model, [ids.shape[1]], dataset_name=name)
    rows = embedded_tokens(model)
    if int(ids.max()) >= rows:
        raise ValueError(
            f"{name} dataset, row 0: the processor makes token id {int(ids.max())}, expected 0 to {rows - 1}, which the "
            "model embeds. Use the processor that belongs to the model."
        )
    check_image_token(batch, causal_core(model).config, name)


def check_image_token(batch: dict[str, torch.Tensor], config: Any, name: str) -> None:
    """Raise ValueError where the processor marks the places of images with another token than the model looks for."""
    token = getattr(config, "image_token_id", None)
    token = getattr(config, "image_token_index", None) if token is None else token
    if token is None or batch.get("pixel_values") is None or bool((batch["input_ids"] == token).any()):
        return
    raise ValueError(
        f"{name} dataset, row 0: no token {token} in the processor's tokens, expected it where the image belongs (the "
        "model's image_token_id). Use the processor that belongs to the model."
    )
