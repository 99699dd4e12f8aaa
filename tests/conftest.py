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
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """A folder of this run's own for what DeepSpeed compiles; xdist's workers inherit it.

    In the user's cache, the lock of a run that was killed while compiling would make every later one wait for ever.
    """
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="trl_tests_torch_extensions_")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop("TORCH_EXTENSIONS_DIR"), ignore_errors=True))


def pytest_collection_finish() -> None:
    """Leave the objects of imported libraries out of later garbage collections.

    accelerate runs a full collection at the start of each training: 0.4 s over what torch and transformers have imported,
    more than all else in most tests.
    """
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


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., PreTrainedModel]:
    """Builds a fresh tiny model of an architecture: see `tests.tiny.tiny_model`."""
    return tiny_model


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Builds a fresh tiny tokenizer with a named chat template: see `tests.tiny_tokenizers.tiny_tokenizer`."""
    return tiny_tokenizer
