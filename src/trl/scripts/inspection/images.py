"""Rows with images as tokens: the collator of training reads them."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset
from transformers import PretrainedConfig

from trl.data.formats import Row, RowDict, image_column
from trl.data.pipeline import SHOWN_ROWS, PreparationReport
from trl.scripts.inspection.texts import DIGEST
from trl.scripts.messages import Shown, sequences

READ_ROWS = 500  # where `--rows` does not say how many: each image is resized


def with_decoder(config: PretrainedConfig, decoder: PretrainedConfig) -> PretrainedConfig:
    """A vision-language model's config with another decoder, and one layer in its tower."""
    small, text, tower = copy.deepcopy(config), config.get_text_config(), getattr(config, "vision_config", None)
    setattr(small, next(name for name, part in vars(config).items() if part is text), decoder)
    for name in {"num_hidden_layers", "depth"} & vars(tower).keys():
        setattr(small.vision_config, name, 1)
    return small


def collated(trainer: Any, rows: Iterable[Any], without: Sequence[str] = ()) -> Iterator[tuple[list[Shown], bool]]:
    """The sequences of raw rows, and whether tokens were cut; `without` some limits. Raises: ValueError naming the row."""
    limits = {name: None for name in without if hasattr(trainer.data_collator, name)}
    for number, row in enumerate(rows):
        collator = replace(trainer.data_collator, **limits)
        try:
            yield sequences(trainer, row, collator), bool(collator.rows_cut)
        except ValueError as error:
            raise ValueError(str(error).replace("row 0 of the batch", f"row {number}")) from error


def read_rows(trainer: Any, rows: Dataset, name: str) -> tuple[np.ndarray, PreparationReport]:
    """Tokens of the longest sequence of each raw row of a set, and the counts that a preparation makes."""
    report, lengths = PreparationReport(name, len(rows)), []
    for number, (shown, is_cut) in enumerate(collated(trainer, rows)):
        lengths.append(max(len(sequence.ids) for sequence in shown))
        report.tokens += sum(len(sequence.ids) for sequence in shown)
        untrained = not all("trained" in sequence.states for sequence in shown)
        equal = len(shown) == 2 and shown[0].ids == shown[1].ids
        for name, is_counted in {"truncated_rows": is_cut, "untrained_rows": untrained, "equal_rows": equal}.items():
            setattr(report, name, getattr(report, name) + is_counted)
            report.first.setdefault(name, []).extend([number] * (is_counted and len(report.first[name]) < SHOWN_ROWS))
    report.first["removed_tokens"] = report.first.get("truncated_rows", [])
    return np.array(lengths), report


def with_digests(rows: Dataset) -> Dataset:
    """The rows with a digest in place of their images."""
    if (column := image_column(rows.column_names)) is None:
        return rows

    def read(row: Row) -> RowDict:
        images = (row[column] or ()) if column == "images" else [row[column]]
        return {DIGEST: xxhash.xxh3_64_hexdigest(b"".join(image.tobytes() for image in images if image))}

    return rows.map(read, remove_columns=[column])
