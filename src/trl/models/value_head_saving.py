"""The weights of a value head on disk: `v_head.*` among those of its language model, or in a file beside an adapter."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import cached_file

logger = logging.getLogger(__name__)

PREFIX = "v_head."
SEPARATE_FILE = "value_head.safetensors"
_SAFE_FILES = (SEPARATE_FILE, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)
_PICKLED_FILES = (WEIGHTS_INDEX_NAME, WEIGHTS_NAME)
_HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")


def load_value_head(model_id: str, *, pickled: bool = False, **options: Any) -> dict[str, Tensor] | None:
    """The `v_head.*` weights of a checkpoint, by their names there; None where it has no value head.

    `model_id` is a folder or a Hub name; of `options`, those that say where on the Hub are read. `pickled` also reads
    `pytorch_model.bin`, in which older TRL saves value heads, with `weights_only=True`.
    """
    options = {name: value for name, value in options.items() if name in _HUB_OPTIONS}
    for names in (_SAFE_FILES, _PICKLED_FILES) if pickled else (_SAFE_FILES,):
        name, file = next(
            ((name, file) for name in names if (file := _find(model_id, name, options))), ("", None)
        )
        weights = {} if file is None else _weights_of(file, name, model_id, options)
        if weights or (file is not None and not pickled):
            return weights or None
    if not pickled and _find(model_id, WEIGHTS_NAME, options) is not None:
        logger.warning(
            "'%s' holds pickled weights (%s): a value head in there is not loaded, and starts anew. If you trust the file, "
            "pass pickled_value_head=True.",
            model_id,
            WEIGHTS_NAME,
        )
    return None


def _weights_of(file: str, name: str, model_id: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """The head's weights in a file, or in the shards that an index names."""
    if name not in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        return _read(file)
    with open(file, encoding="utf-8") as index:
        shards = {shard for key, shard in json.load(index)["weight_map"].items() if key.startswith(PREFIX)}
    files = [_find(model_id, shard, options) for shard in sorted(shards)]
    return {key: weight for found in files if found for key, weight in _read(found).items()}


def save_value_head(weights: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Write the head's weights to a file of their own, where the model's own saving has no place for them."""
    os.makedirs(folder, exist_ok=True)
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(tensors, os.path.join(folder, SEPARATE_FILE), metadata={"format": "pt"})


def remove_value_head(folder: str | os.PathLike[str]) -> None:
    """Remove the separate file that an adapter left in a folder: it would be read instead of what is saved there next."""
    Path(folder, SEPARATE_FILE).unlink(missing_ok=True)


@contextmanager
def expected_value_head() -> Iterator[None]:
    """Keep transformers' report of a loading quiet where all it has to say is that a value head is no part of the model."""
    reports = logging.getLogger("transformers.modeling_utils")
    reports.addFilter(_says_more)
    try:
        yield
    finally:
        reports.removeFilter(_says_more)


def _says_more(record: logging.LogRecord) -> bool:
    rows = re.findall(
        r"^(\S+)\s+\|.*(?:UNEXPECTED|MISSING|MISMATCH|CONVERSION)", record.getMessage(), re.MULTILINE
    )
    return not rows or any(not name.startswith(PREFIX) for name in rows)


def _find(model_id: str, name: str, options: dict[str, Any]) -> str | None:
    return cached_file(
        model_id,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **options,
    )


def _read(file: str) -> dict[str, Tensor]:
    if not file.endswith(".safetensors"):
        found = torch.load(file, map_location="cpu", weights_only=True)
        return {key: weight for key, weight in found.items() if key.startswith(PREFIX)}
    with safe_open(file, framework="pt") as weights:
        return {key: weights.get_tensor(key) for key in weights.keys() if key.startswith(PREFIX)}  # noqa: SIM118
