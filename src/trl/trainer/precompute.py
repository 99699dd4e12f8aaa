"""The reference's log-probabilities of a whole dataset, computed once and kept on disk.

Values lie in `<HF_DATASETS_CACHE>/trl_reference/<fingerprint>.safetensors`, one float64 column per name. The
fingerprint covers the rows, the reference's weights and config, the precision, a collator that makes the tokens itself
(of rows with images, or one's own) with its processor, and the settings a trainer names, so that runs that differ in
anything else (beta, learning rate, loss) share them. The files may be deleted at any time.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset, IterableDataset, config
from datasets.fingerprint import Hasher
from safetensors.numpy import load_file, save_file
from torch import Tensor

from trl.checkpoints.identity import hash_rows
from trl.collators.preference import DPODataCollatorWithPadding, PairCollator
from trl.collators.unpaired import UnpairedCollator
from trl.data.formats import RowDict, column_names
from trl.data.rendering import Fields
from trl.reporting.run_lines import long_bar

logger = logging.getLogger(__name__)

FORMAT = 2  # raise it when the same inputs no longer give the same numbers
FOLDER = "trl_reference"
# These lay out tokens that are in the rows: no number depends on how.
_LAY_OUT_TOKENS = (PairCollator, DPODataCollatorWithPadding, UnpairedCollator)


@dataclass(frozen=True)
class ReferencePass:
    """How the rows of a prepared dataset are scored by a reference.

    `score` takes what `collate` made of some rows, on the device, and gives each column's values, one per row:
    `(rows,)`. `settings` are those, besides rows and reference, on which values depend; they must go into JSON.
    """

    columns: Sequence[str]
    collate: Callable[[list[RowDict]], Fields]
    score: Callable[[Fields], Mapping[str, Tensor]]
    batch_size: int
    settings: Fields = field(default_factory=dict)
    copies: int = 1  # neighbouring processes that score the same rows together


def precompute_ref_log_probs(
    dataset: object, scoring: ReferencePass, *, reference_fingerprint: str, accelerator: Accelerator,
    dataset_name: str = "train",
) -> Dataset:  # fmt: skip
    """The dataset with the reference's columns: read from disk if an earlier run left them there, else computed.

    Each process scores its share; afterwards all have the same columns. Values are float64, which holds the float32
    ones of a forward exactly. All processes must call it. Columns that the dataset has already are kept.

    Raises: ValueError for a stream, for some columns without the others, and for values that are not finite.
    """
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{dataset_name} dataset: precompute_ref_log_probs=True goes over all rows before training and needs a "
            f"datasets.Dataset, got a {type(dataset).__name__}. Load it without streaming, or set it to False."
        )
    if has_reference_columns(dataset, scoring.columns, dataset_name):
        return dataset
    file = values = None
    if datasets.is_caching_enabled():
        name = _fingerprint(dataset, scoring, reference_fingerprint, accelerator.mixed_precision)
        file = Path(config.HF_DATASETS_CACHE) / FOLDER / f"{name}.safetensors"
        values = _read(file, scoring.columns, len(dataset))
    if all(gather_object([values is not None])):
        logger.info("%s dataset: log-probabilities of the reference are read from %s.", dataset_name, file)
    else:
        if file is not None:  # a folder that cannot be written is found before the pass
            file.parent.mkdir(parents=True, exist_ok=True)
        values = _score_all(dataset, scoring, accelerator, dataset_name)
        if file is not None and accelerator.is_local_main_process:
            handle, aside = tempfile.mkstemp(dir=file.parent, suffix=".incomplete")
            os.close(handle)
            save_file(values, aside)
            os.replace(aside, file)  # a reader sees a whole file or none
            logger.info("%s dataset: log-probabilities of the reference are kept in %s.", dataset_name, file)
        accelerator.wait_for_everyone()
    for column, numbers in (values or {}).items():
        dataset = dataset.add_column(column, numbers)  # type: ignore[call-arg]
    return dataset


def _score_all(
    dataset: Dataset, scoring: ReferencePass, accelerator: Accelerator, dataset_name: str
) -> dict[str, np.ndarray]:
    """Every process scores as many batches of consecutive rows, because sharded weights need all of them."""
    size, copies = scoring.batch_size, scoring.copies
    rank, processes = accelerator.process_index // copies, accelerator.num_processes // copies
    starts = range(0, len(dataset), size)
    # Where batches do not come out even, some processes score the last one again.
    local_starts = [starts[min(first + rank, len(starts) - 1)] for first in range(0, len(starts), processes)]
    batches = []
    title = f"Reference log-probabilities ({dataset_name})"
    for start in long_bar(local_starts, title, accelerator.is_local_main_process):
        rows = [dataset[row] for row in range(start, min(start + size, len(dataset)))]
        scores = scoring.score(send_to_device(scoring.collate(rows), accelerator.device))
        batches.append((start, {name: scores[name].detach().cpu().double().numpy() for name in scoring.columns}))
    values = {column: np.full(len(dataset), np.nan) for column in scoring.columns}
    for start, scores in gather_object(batches):
        for name, part in scores.items():
            values[name][start : start + len(part)] = part
    for column, numbers in values.items():
        bad = np.flatnonzero(~np.isfinite(numbers))
        if len(bad):
            raise ValueError(
                f"{dataset_name} dataset, row {bad[0]}: {column} must be finite, got {numbers[bad[0]]} ({len(bad)} "
                "such rows). Check the reference's weights, and its precision: float16 overflows, bfloat16 does not."
            )
    return values


def has_reference_columns(dataset: object, columns: Sequence[str], dataset_name: str) -> bool:
    """Whether a data set has the reference's columns. Raises ValueError where it has some of them."""
    known = column_names(dataset) if isinstance(dataset, (Dataset, IterableDataset)) else []
    present = [column for column in columns if column in known]
    if present and len(present) < len(columns):
        missing = [column for column in columns if column not in known]
        raise ValueError(
            f"{dataset_name} dataset has the reference's columns {present} and lacks {missing}, expected all or none. "
            "Remove them to have all computed."
        )
    return bool(present)


def _read(file: Path, columns: Sequence[str], rows: int) -> dict[str, np.ndarray] | None:
    """The columns in a file, None where it is not there or not whole."""
    if not file.is_file():
        return None
    values = load_file(file)
    if set(values) != set(columns) or any(len(numbers) != rows for numbers in values.values()):
        return None
    return {column: values[column] for column in columns}


def _fingerprint(dataset: Dataset, scoring: ReferencePass, reference: str, mixed_precision: str) -> str:
    """The name of the file of the values. Raises what pickling a user's own collator raises."""
    lays_out = type(scoring.collate) in _LAY_OUT_TOKENS
    parts = {
        "collate": None if lays_out else Hasher.hash(scoring.collate),
        "format": FORMAT,
        "columns": list(scoring.columns),
        "settings": dict(scoring.settings),
        "reference": reference,
        "mixed_precision": mixed_precision,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "rows": hash_rows(dataset),
    }
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
