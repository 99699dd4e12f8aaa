"""CPU seconds of packing 100,000 rows, and of `import trl` in a fresh interpreter."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from statistics import median
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from benchmarks.data import GSM8K_LENGTHS
from datasets import Dataset

from trl import pack_dataset


class PackingTime(NamedTuple):
    strategy: str
    seconds: float
    packed_rows: int
    filled: float  # share of the packed rows' room that holds tokens


def time_packing(*, rows: int = 100_000, seq_length: int = 512) -> list[PackingTime]:
    """`pack_dataset` on rows with GSM8K's lengths, two columns each, the copy to a new table included."""
    dataset = _dataset(rows, seq_length)
    found = []
    for strategy in ("bfd", "wrapped"):
        start = time.process_time()
        packed = pack_dataset(dataset, seq_length, strategy, map_kwargs={"load_from_cache_file": False})
        seconds = time.process_time() - start
        tokens = len(packed.data.column("input_ids").combine_chunks().values)
        found.append(PackingTime(strategy, seconds, len(packed), tokens / (len(packed) * seq_length)))
    return found


def _dataset(rows: int, seq_length: int) -> Dataset:
    rng = random.Random(0)
    lengths = [sum(GSM8K_LENGTHS.draw(rng, max_length=seq_length)) for _ in range(rows)]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    total = sum(lengths)
    columns = {
        "input_ids": pa.array(np.arange(total) % 5000, pa.int64()),
        "completion_mask": pa.array(np.arange(total) % 2, pa.int64()),
    }
    lists = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
    return Dataset(pa.table(lists))


def time_import(statement: str, *, rounds: int = 5) -> float:
    """CPU seconds of a statement in a fresh interpreter, less those of an interpreter that does nothing."""

    def spent(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return median(spent(statement) - spent("pass") for _ in range(rounds))
