"""The reference's log-probabilities of a whole dataset, computed once and kept on disk.

Values lie in `<HF_DATASETS_CACHE>/trl_reference/<fingerprint>.safetensors`, one float64 column per name. The fingerprint
covers the rows, the reference's weights and config, the precision, a collator that makes the tokens itself (of rows with
images, or one's own) with its processor, and the settings a trainer names, so that runs that differ in anything else (beta,
learning rate, loss) share them. The files may be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset, config
from datasets.fingerprint import Hasher, generate_random_fingerprint
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor
from tqdm.auto import tqdm

from trl.checkpoints.identity import hash_rows
from trl.collators.preference import DPODataCollatorWithPadding, PairCollator
from trl.collators.seq2seq import Seq2SeqPairCollator
from trl.collators.unpaired import UnpairedCollator
from trl.data.formats import column_names

logger = logging.getLogger(__name__)

FORMAT = 2  # raise it when the same inputs no longer give the same numbers
FOLDER = "trl_reference"
# These lay out tokens that are in the rows: no number depends on how.
_LAY_OUT_TOKENS = (PairCollator, DPODataCollatorWithPadding, Seq2SeqPairCollator, UnpairedCollator)


@dataclass(frozen=True)
class ReferencePass:
    """How the rows of a prepared dataset are scored by a reference.

    `score` takes what `collate` made of some rows, on the device, and gives each column's values, one per row: `(rows,)`.
    `settings` are those, besides rows and reference, on which values depend; they must go into JSON.
    """

    columns: Sequence[str]
    collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]]
    score: Callable[[Mapping[str, Any]], Mapping[str, Tensor]]
    batch_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)


def precompute_ref_log_probs(
    dataset: Any,
    scoring: ReferencePass,
    *,
    reference_fingerprint: str,
    accelerator: Accelerator,
    dataset_name: str = "train",
) -> Dataset:
    """The dataset with the reference's columns: read from disk if an earlier run left them there, else computed.

    Each process scores its share; afterwards all have the same columns. Values are float64, which holds the float32 ones
    of a forward exactly. All processes must call it. Columns that the dataset has already are kept.

    Raises: ValueError for a stream, for some columns without the others, and for values that are not finite.
    """
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{dataset_name} dataset: precompute_ref_log_probs=True goes over all rows before training and needs a "
            f"datasets.Dataset, got a {type(dataset).__name__}. Load it without streaming, or set it to False."
        )
    if has_reference_columns(dataset, scoring.columns, dataset_name):
        logger.info(
            "%s dataset: its own columns %s are the reference's.", dataset_name, list(scoring.columns)
        )
        return dataset
    name = _fingerprint(dataset, scoring, reference_fingerprint, accelerator.mixed_precision)
    file = Path(config.HF_DATASETS_CACHE) / FOLDER / f"{name}.safetensors"
    caching = datasets.is_caching_enabled() and name is not None
    known = _read(file, scoring.columns, len(dataset)) if caching else None
    if all(gather_object([known is not None])):
        assert known is not None and name is not None
        logger.info("%s dataset: log-probabilities of the reference are read from %s.", dataset_name, file)
        return _with_columns(dataset, known, name)
    if caching:  # a folder that cannot be written is found before the pass
        file.parent.mkdir(parents=True, exist_ok=True)
    values = _score_all(dataset, scoring, accelerator, dataset_name)
    _check_finite(values, dataset_name)
    if caching and accelerator.is_local_main_process:
        _write(file, values)
        logger.info("%s dataset: log-probabilities of the reference are kept in %s.", dataset_name, file)
    accelerator.wait_for_everyone()
    return _with_columns(dataset, values, name or generate_random_fingerprint())


# ---- the pass


def _score_all(
    dataset: Dataset, scoring: ReferencePass, accelerator: Accelerator, dataset_name: str
) -> dict[str, np.ndarray]:
    """Every process scores batches of consecutive rows, all equally many: sharded weights need all of them."""
    values = {column: np.full(len(dataset), np.nan) for column in scoring.columns}
    batches = list(_own_batches(len(dataset), scoring.batch_size, accelerator))
    found = []
    title = f"Reference log-probabilities ({dataset_name})"
    for rows in tqdm(batches, desc=title, disable=not accelerator.is_local_main_process):
        batch = scoring.collate([dataset[row] for row in rows])
        scores = scoring.score(send_to_device(batch, accelerator.device))
        found.append((rows.start, {name: _as_column(scores[name], len(rows)) for name in scoring.columns}))
    for start, scores in gather_object(found):
        for name, part in scores.items():
            values[name][start : start + len(part)] = part
    return values


def _own_batches(rows: int, batch_size: int, accelerator: Accelerator) -> Iterator[range]:
    """This process's batches; where they do not come out even, some processes do the last one again."""
    starts = range(0, rows, batch_size)
    for first in range(0, len(starts), accelerator.num_processes):
        start = starts[min(first + accelerator.process_index, len(starts) - 1)]
        yield range(start, min(start + batch_size, rows))


def _as_column(values: Tensor, rows: int) -> np.ndarray:
    if values.shape != (rows,):
        raise ValueError(
            f"a reference must give one value per row, expected shape ({rows},), got {tuple(values.shape)}. Check the "
            "score function."
        )
    return values.detach().to("cpu", torch.float64).numpy()


def _check_finite(values: Mapping[str, np.ndarray], dataset_name: str) -> None:
    for column, numbers in values.items():
        bad = np.flatnonzero(~np.isfinite(numbers))
        if len(bad):
            raise ValueError(
                f"{dataset_name} dataset, row {bad[0]}: {column} must be finite, got {numbers[bad[0]]} ({len(bad)} such "
                "rows). Check the reference's weights, and its precision: float16 overflows where bfloat16 does not."
            )


def has_reference_columns(dataset: Any, columns: Sequence[str], dataset_name: str) -> bool:
    """Whether a data set has the reference's columns.

    Raises: ValueError where it has some of them.
    """
    known = column_names(dataset)
    present = [column for column in columns if column in known]
    if present and len(present) < len(columns):
        missing = sorted(set(columns) - set(present))
        raise ValueError(
            f"{dataset_name} dataset has the reference's columns {present} and lacks {missing}, expected all or none. Remove "
            "them to have all computed."
        )
    return bool(present)


def _with_columns(dataset: Dataset, values: Mapping[str, np.ndarray], name: str) -> Dataset:
    for column, numbers in values.items():
        dataset = dataset.add_column(column, numbers, new_fingerprint=xxhash.xxh3_64((name + column).encode()).hexdigest())  # type: ignore[call-arg]  # fmt: skip
    return dataset


# ---- the file


def _read(file: Path, columns: Sequence[str], rows: int) -> dict[str, np.ndarray] | None:
    """The columns in a file, None where it is not there or not whole."""
    if not file.is_file():
        return None
    with safe_open(file, framework="numpy") as opened:
        values = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    if set(values) != set(columns) or any(len(numbers) != rows for numbers in values.values()):
        return None
    return {column: values[column] for column in columns}


def _write(file: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write aside and rename: a reader sees a whole file or none."""
    handle, aside = tempfile.mkstemp(dir=file.parent, suffix=".incomplete")
    os.close(handle)
    save_file(dict(values), aside)
    os.replace(aside, file)


# ---- the fingerprint


def _fingerprint(
    dataset: Dataset, scoring: ReferencePass, reference: str, mixed_precision: str
) -> str | None:
    """The name under which the values are kept; None, said in the log, where nobody can tell what they depend on."""
    made_by = {}
    if type(scoring.collate) not in _LAY_OUT_TOKENS:
        try:
            made_by = {"collate": Hasher.hash(scoring.collate)}
        except Exception as error:  # whatever a collator of one's own raises when it is pickled
            logger.warning(
                "The log-probabilities of the reference are not kept: data_collator %r cannot be pickled (%s), so that a later "
                "run could not tell whether it is the same.", scoring.collate, error,
            )  # fmt: skip
            return None
    parts = {
        **made_by,
        "format": FORMAT,
        "columns": list(scoring.columns),
        "settings": dict(scoring.settings),
        "reference": reference,
        "mixed_precision": mixed_precision,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "rows": hash_rows(dataset),
    }
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
