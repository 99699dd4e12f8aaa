"""The benchmark of distillation compares equal work."""

from argparse import Namespace

import pytest
from benchmarks.distillation import SIDES, measure_side, padded_rows


@pytest.fixture
def args() -> Namespace:
    return Namespace(size="tiny", vocab=5000, tokens=768, prompts=2, steps=1, quick=True)


def test_both_sides_have_the_same_loss_on_the_rows_of_the_dataset(args: Namespace) -> None:
    ours, plain = (measure_side(args, "data", side) for side in SIDES)
    assert ours["loss"] == pytest.approx(plain["loss"], rel=2e-3)  # the plain one cancels in float32
    assert ours["tokens"] == plain["tokens"] > 200


def test_rows_are_as_the_documents_say() -> None:
    rows = padded_rows(4096)
    real, trained = (
        sum(len(row["input_ids"]) for row in rows),
        sum(sum(row["completion_mask"]) for row in rows),
    )
    assert 256 * len(rows) == 4096 and 0.55 < real / 4096 < 0.65 and 0.48 < trained / real < 0.52
