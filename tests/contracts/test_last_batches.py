"""Two processes whose epochs end in a batch that is not full train as one process does, in float64.

Gradients of each step and the weights at the end agree to 1e-10 of the largest, metrics to 1e-12.
"""

import pytest
import torch

from tests.contracts.last_batches import (
    MODELS,
    OF_METHODS,
    OTHERS,
    ROWS,
    dropped,
    loader_of_a_program,
    of_model,
    resumed,
    run,
    sft,
)  # fmt: skip
from tests.contracts.methods import Found
from tests.contracts.test_invariance import assert_same
from tests.two_processes import launch


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launch("tests.contracts.last_batches", str(folder / "out.pt"), str(folder / "run"), timeout=900)
    return torch.load(folder / "out.pt", weights_only=False)


def expected(name: str):
    if name in ("resumed", "dropped"):
        return {"resumed": resumed, "dropped": dropped}[name](1)
    if name in OTHERS:
        return run(sft, 1, 5, 1, **OTHERS[name])
    if name in MODELS:
        return of_model(name, 1)
    method, *sizes = OF_METHODS[name]
    make, own = ROWS[method]
    return run(make, 1, *sizes, **own)


@pytest.mark.parametrize("name", [*OF_METHODS, *OTHERS, *MODELS, "resumed", "dropped"])
def test_two_processes_are_one(name, two):
    found, alone = Found(*two[name]), expected(name)
    assert_same(found, alone, 1e-12)
    if name != "all counted":  # which counts padding
        assert found.evaluation == alone.evaluation


def test_a_loader_of_the_program_counts_each_row_once(two):
    assert two["own loader"] == pytest.approx(loader_of_a_program(1), rel=1e-12)


def test_data_sets_of_different_lengths_are_refused(two):
    train, evaluation = two["uneven"]
    assert train.startswith(
        "the train dataset must be the same in all processes, got [8, 7] rows. Give each process all rows"
    )
    assert evaluation.startswith("the eval dataset must be the same in all processes, got [8, 7] rows")
