"""Rows with images as tokens: the collator of training reads them."""

from typing import TYPE_CHECKING

import xxhash
from datasets import Dataset

from trl.collators.images import DataCollatorForVisionLanguageModeling
from trl.data.formats import Row, RowDict, image_column
from trl.models.loading import load_processing_class

if TYPE_CHECKING:
    from trl.options.model import ModelConfig
    from trl.trainer.sft_config import SFTConfig

READ_ROWS = 500  # where `--rows` does not say how many: each image is resized


def with_tokens(rows: Dataset, args: "SFTConfig", model_args: "ModelConfig", limit: int | None) -> Dataset:
    """The first rows with `input_ids`, `labels` and a digest in place of the images. Raises: what the collator raises."""
    column, path = str(image_column(rows.column_names)), str(model_args.model_name_or_path)
    place = {"revision": model_args.model_revision, "trust_remote_code": model_args.trust_remote_code}
    options = {"completion_only_loss": args.completion_only_loss, "dataset_text_field": args.dataset_text_field}
    processor = load_processing_class(path, **place)
    collate = DataCollatorForVisionLanguageModeling(processor, **options)  # type: ignore[arg-type]
    limited = DataCollatorForVisionLanguageModeling(processor, max_length=args.max_length, **options)  # type: ignore[arg-type]

    def read(row: Row) -> RowDict:
        batch = collate([row])
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        if args.max_length and len(ids) > args.max_length:
            limited([row])  # raises where an image loses tokens
        images = row[column] if column == "images" else [row[column]]
        digest = xxhash.xxh3_64_hexdigest(b"".join(image.tobytes() for image in images))
        return {"input_ids": ids, "labels": labels, "image_digest": digest}

    return rows.select(range(min(len(rows), limit or READ_ROWS))).map(read, remove_columns=[column])
