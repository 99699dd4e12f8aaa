"""Rows with images: what is checked before the first step. The rows stay as they are until the collator reads them."""

import copy
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import ProcessorMixin

from trl.collators.images import DataCollatorForVisionLanguageModeling, DataCollatorForVisionPreference
from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.collators.preference import REFERENCE_COLUMNS, DPODataCollatorWithPadding, PairCollator
from trl.data.formats import IMAGE_COLUMNS, StoredOrStream, column_names
from trl.data.image_rows import check_image_rows
from trl.data.prepared_sets import DataSets, RowSet
from trl.data.validation import check_sft_settings
from trl.models.parts import causal_core, embedded_tokens
from trl.models.policy import Policy
from trl.models.setup import check_positions
from trl.trainer.arguments import Collator, FormattingFunction
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.sft_config import SFTConfig

# The columns of raw rows that the collators read.
TEXT_COLUMNS = (
    *IMAGE_COLUMNS, "messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs"
)  # fmt: skip
PAIR_COLUMNS = (
    *IMAGE_COLUMNS, "prompt", "chosen", "rejected", "tools", "chat_template_kwargs", *REFERENCE_COLUMNS
)  # fmt: skip

_PADDED = "rows with images are padded"
_REFUSED = {
    "packing": "an image belongs to its row, and rows with images are padded",
    "eval_packing": "an image belongs to its row, and rows with images are padded",
    "padding_free": _PADDED,
    "assistant_only_loss": "the assistant's tokens are not told apart beside images; 'prompt' and 'completion' columns "
    "train the completion only",
}
_REFUSED_OF_PAIRS = {"padding_free": _PADDED, "prefix_sharing": _PADDED}


@dataclass
class ImageSets(DataSets):
    """Data sets with images: checked, shuffled where there is a seed, and otherwise left as they are for `collator`.

    Rows that the user's own collator reads are not `checked`.
    """

    collator: Any  # with `rows`, where they are checked
    model: nn.Module
    checked: bool
    shuffle_seed: int | None = None

    def prepared(self, dataset: RowSet, name: str, *, is_training: bool = False) -> RowSet:
        if not self.checked or not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset
        row_type, collator = check_image_rows(dataset, self.collator.rows, name=name).row_type, self.collator
        if isinstance(collator, DataCollatorForVisionLanguageModeling):
            check_sft_settings(
                row_type, name=name, columns=column_names(dataset), assistant_only_loss=False,
                completion_only_loss=collator.completion_only_loss or None, is_formatted=False,
            )  # fmt: skip
        _try_first_row(dataset, collator, self.model, name)
        return dataset


def image_sets(
    collator: Collator | None, args: SFTConfig, policy: Policy, formatting_func: FormattingFunction | None
) -> ImageSets:
    """The sets of supervised fine-tuning, with the user's `collator`, which may read any rows, or the default one.

    Raises: ValueError, TypeError or ImportError for what these rows cannot be trained with.
    """
    _refuse(args, _REFUSED)
    if formatting_func is not None:
        raise ValueError(
            "formatting_func was given with rows of images, expected None: the processor needs messages or texts "
            "beside the images. Map the rows to 'messages', or to 'prompt' and 'completion', before training."
        )
    options: Any = args.dataset_kwargs or {}
    if unused := sorted(set(options) - {"skip_prepare_dataset"}):
        raise ValueError(
            f"dataset_kwargs has {unused}, expected skip_prepare_dataset only: the data collator tokenises rows with "
            "images. Leave them out."
        )
    names = ("max_length", "completion_only_loss", "pad_to_multiple_of", "dataset_text_field")
    sets = _sets_of(
        collator, DataCollatorForVisionLanguageModeling, DataCollatorForLanguageModeling, policy, args, names
    )
    sets.checked = sets.checked and not options.get("skip_prepare_dataset")
    sets.shuffle_seed = args.seed if args.shuffle_dataset else None
    return sets


def image_pair_sets(collator: Collator | None, args: DPOConfig, policy: Policy) -> ImageSets:
    """The sets of preference pairs, with the user's `collator`, which may read rows in any way, or the default one.

    Raises: ValueError, TypeError or ImportError for what these rows cannot be trained with.
    """
    _refuse(args, _REFUSED_OF_PAIRS)
    of_text = (PairCollator, DPODataCollatorWithPadding)
    names = ("max_prompt_length", "max_completion_length", "max_length", "tools")
    sets = _sets_of(collator, DataCollatorForVisionPreference, of_text, policy, args, names)
    if args.generate_during_eval and not sets.checked:
        raise ValueError(
            f"generate_during_eval=True with images needs the default data_collator, got {collator!r}. Set it to "
            "False, or leave data_collator out."
        )
    return sets


def _sets_of(
    collator: Collator | None, ours: type, of_text: type | tuple[type, ...], policy: Policy, args: object,
    names: Sequence[str],
) -> ImageSets:  # fmt: skip
    """The sets for the user's `collator`, or for one of `ours` with the settings of these `names`.

    Raises: TypeError for a collator of ours that reads tokens only.
    """
    if isinstance(collator, of_text):
        raise TypeError(
            f"data_collator is a {type(collator).__name__}, which drops the images of the rows. Leave it out, give a "
            f"{ours.__name__}, or remove the column of images to train on text."
        )
    if collator is not None and not isinstance(collator, ours):
        return ImageSets(collator, policy.model, checked=False)
    processor = check_parts(policy)
    return ImageSets(
        collator or ours(processor, **{name: getattr(args, name) for name in names}), policy.model, checked=True
    )


def _refuse(args: object, refused: Mapping[str, str]) -> None:
    for name, why in refused.items():
        if getattr(args, name) is True:
            raise ValueError(f"{name}=True with rows of images, expected False: {why}. Set {name}=False.")


def check_parts(policy: Policy) -> ProcessorMixin:
    """The policy's processor. Raises ImportError, TypeError or ValueError where Pillow, it or a model is missing."""
    if importlib.util.find_spec("PIL") is None:
        raise ImportError("rows with images need Pillow. Install it with: pip install 'trl[vlm]'")
    processing_class, core = policy.processing_class, causal_core(policy.model)
    if not isinstance(processing_class, ProcessorMixin) or not hasattr(processing_class, "image_processor"):
        raise TypeError(
            f"processing_class is a {type(processing_class).__name__}, but the data set has a column of images, "
            "expected a processor. Load it with AutoProcessor.from_pretrained, or remove the column to train on text."
        )
    if "pixel_values" not in inspect.signature(type(core).forward).parameters:
        raise ValueError(
            f"model is a {type(core).__name__}, which takes no images, but the rows have some, expected a "
            "vision-language "
            "model. Load one with AutoModelForImageTextToText, or remove the column of images to train on text."
        )
    return processing_class


def _try_first_row(dataset: StoredOrStream, collator: Collator, model: nn.Module, name: str) -> None:
    """Make a batch of the first row. Raises ValueError where the model cannot take it."""
    batch = copy.copy(collator)([next(iter(dataset))])  # a copy: the trial does not count in rows_cut
    ids = batch["input_ids"]
    check_positions(model, [ids.shape[1]], dataset_name=name)
    rows = embedded_tokens(model)
    if int(ids.max()) >= rows:
        raise ValueError(
            f"{name} dataset, row 0: the processor makes token id {int(ids.max())}, expected 0 to {rows - 1}, the "
            "model's vocabulary. Use the processor that belongs to the model."
        )
    check_image_token(batch, causal_core(model).config, name)


def check_image_token(batch: dict[str, torch.Tensor], config: object, name: str) -> None:
    """Raise ValueError where the processor marks the places of images with another token than the model looks for."""
    token = getattr(config, "image_token_id", None)
    token = getattr(config, "image_token_index", None) if token is None else token
    if token is None or batch.get("pixel_values") is None or bool((batch["input_ids"] == token).any()):
        return
    raise ValueError(
        f"{name} dataset, row 0: no token {token} in the processor's tokens, expected it where the image belongs (the "
        "model's image_token_id). Use the processor that belongs to the model."
    )
