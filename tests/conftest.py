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
import json
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.fixed_costs import spare

torch.set_num_threads(1)
gc.disable()  # until the tests are collected: among all that is imported, collections take seconds

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first: one that starts last would leave the other workers of xdist without work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    spare()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Temporary folders of tests, and of programs in forks of what their modules have imported, go when the run ends.

    `tmp_path` stays where pytest has it.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    with TemporaryDirectory(prefix="trl-tests-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        if two_processes := sys.modules.get("tests.two_processes"):
            two_processes.prepared()
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def imported_so_far() -> None:
    """Leaves what the tests before have imported out of later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same torch random state, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def published() -> Callable[[str], list[dict[str, Any]]]:
    """Reads rows of a published data set; without them, the test is skipped.

    `gsm8k/train` are the rows of openai/gsm8k, `hh_harmless/train` and `hh_harmless/test` those of harmless-base in
    Anthropic/hh-rlhf: files with one JSON object per line in the folder `TRL_TEST_DATA`, or `shared/data` beside the repository.
    """
    folder = Path(os.environ.get("TRL_TEST_DATA") or ROOT.parent / "shared" / "data")

    def rows(name: str) -> list[dict[str, Any]]:
        file = folder / f"{name}.jsonl"
        if not file.is_file():
            pytest.skip(f"{name}.jsonl is a published data set that is not at hand: set TRL_TEST_DATA to its folder")
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    return rows
