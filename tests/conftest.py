"""Before anything imports transformers: no network, one thread, no tokenizer workers."""

import os

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
)

import gc
from functools import cache
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
gc.disable()  # until the tests are collected: among all that is imported, collections take seconds

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_finish() -> None:
    """Leave the objects of imported libraries out of later garbage collections.

    accelerate runs a full collection at the start of each training: 0.4 s over what torch and transformers have imported,
    more than all else in most tests.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    from accelerate.utils import other

    # It reads the package's metadata each time: a tenth of what a small run takes.
    other.is_deepspeed_available = cache(other.is_deepspeed_available)


@pytest.fixture(scope="module", autouse=True)
def imported_so_far() -> None:
    """The same for what the tests before have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same torch random state, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference documents and data beside the repository; tests that need it are skipped without it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not present on this machine")
    return folder
