"""Preference pairs with images: what is checked before the first step; the rows stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset

from trl.collators.preference import REFERENCE_COLUMNS, DPODataCollatorWithPadding, PairCollator
from trl.collators.vision import DataCollatorForVisionPreference
from trl.data.image_checks import check_pair_image_rows
from trl.data.image_rows import IMAGE_COLUMNS
from trl.data.prepared_sets import DataSets
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.sft_images import check_parts, is_foreign, refuse_settings, try_first_row

# The columns of raw rows that the collator reads.
PAIR_RAW_COLUMNS = (
    *IMAGE_COLUMNS, "prompt", "chosen", "rejected", "tools", "chat_template_kwargs", *REFERENCE_COLUMNS
)  # fmt: skip

_REFUSED = {
    "padding_free": "rows with images are padded",
    "prefix_sharing": "rows with images are padded, and each completion has a prompt of its own",
}


def collator_for_image_pairs(given: Any, args: DPOConfig, processing_class: Any, model: Any) -> Any:
    """The collator of pairs with images: the given one, which may read them in any way, or the default one.

    Raises: ValueError, TypeError or ImportError for what these rows cannot be trained with, saying what to change.
    """
    refuse_settings(args, _REFUSED)
    of_text = (PairCollator, DPODataCollatorWithPadding)
    if is_foreign(given, DataCollatorForVisionPreference, of_text=of_text):
        if args.generate_during_eval:
            raise ValueError(
                f"generate_during_eval=True with images needs the default data_collator, got {given!r}, whose prompts are "
                "not known. Set it to False, or leave data_collator out."
            )
        return given
    check_parts(processing_class, model)
    return given or DataCollatorForVisionPreference(
        processing_class,
        max_prompt_length=args.max_prompt_length,
        max_completion_length=args.max_completion_length,
        max_length=args.max_length,
        tools=args.tools,  # type: ignore[arg-type]
    )


@dataclass
class ImagePairSets(DataSets):
    """The data sets of a trainer of pairs with images: checked, and left as they are for `collator`."""

    collator: Any
    model: Any

    def later(self, dataset: Any) -> Any:
        return self.evaluation(dataset) if isinstance(dataset, (Dataset, IterableDataset)) else dataset

    def prepared(self, dataset: Any, name: str, *, is_training: bool = False) -> Any:
        is_ours = isinstance(self.collator, DataCollatorForVisionPreference)
        if is_ours and isinstance(dataset, (Dataset, IterableDataset)):
            check_pair_image_rows(dataset, self.collator.processor, name=name, tools=self.collator.tools)
            try_first_row(dataset, self.collator, self.model, name=name)
        return dataset
