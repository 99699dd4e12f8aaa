"""The sizes of a window of groups, and what is said of numbers that do not divide."""

from types import SimpleNamespace

import pytest

from trl.rollouts.schedule import check_evaluation, group_sizes

# device rows, accumulation, processes, generations, generation batch, steps per generation, passes
#   -> generated at once, steps per generation, rows of the window, mini-batches, micro-batches
GOOD = {
    "alone": ((8, 1, 1, 4), (8, 1, 8, 1, 1)),
    "accumulated": ((4, 2, 1, 8), (8, 2, 8, 1, 2)),
    "two processes": ((4, 2, 2, 8), (16, 2, 16, 1, 2)),
    "several steps": ((4, 2, 1, 4, None, 8), (32, 8, 32, 4, 2)),
    "by rows": ((8, 2, 1, 4, 16), (16, 2, 16, 1, 2)),
    "both, and they agree": ((8, 2, 1, 4, 32, 4), (32, 4, 32, 2, 2)),
    "less than a step": ((8, 4, 1, 8, None, 2), (16, 2, 32, 1, 4)),
    "neither divides": ((8, 2, 1, 4, None, 3), (24, 3, 48, 3, 2)),
}


NAMES = (
    *("device_rows", "gradient_accumulation_steps", "world_size", "num_generations"),
    *("generation_batch_size", "steps_per_generation", "num_iterations"),
)


def settings(*given):
    named = dict(zip(NAMES, (*given, *(None, None, 1)[len(given) - 4 :]), strict=True))
    return SimpleNamespace(**named, sp_size=1, data_processes=named["world_size"])


@pytest.mark.parametrize(("given", "expected"), GOOD.values(), ids=GOOD)
def test_sizes(given, expected):
    found = group_sizes(settings(*given))
    sizes = found.sizes
    assert (
        found.generation_batch_size, found.steps_per_generation, sizes.rows, sizes.mini_batches, sizes.micro_batches
    ) == expected  # fmt: skip
    assert sizes.processes == given[2] and sizes.passes == 1
    # What a window holds is what its optimiser steps learn from.
    assert sizes.rows == sizes.mini_batches * sizes.micro_batches * given[0] * given[2]


def test_passes_are_iterations():
    sizes = group_sizes(settings(4, 1, 1, 2, None, 3, 2)).sizes
    assert (sizes.passes, sizes.steps) == (2, 6)


BAD = {
    "groups": ((4, 3, 1, 8), r"12 completions .*num_generations=8\. Set generation_batch_size to a multiple of 24"),
    "one row": ((1, 1, 1, 8), "1 completions .*num_generations=8.*generation_batch_size to a multiple of 8"),
    "rows of a micro-batch": ((8, 1, 2, 4, 40), r"generation_batch_size=40 must be .*16.* multiple of 16\."),
    "disagreement": ((8, 1, 1, 4, 16, 4), r"generation_batch_size=16 .* steps_per_generation\."),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD)
def test_numbers_that_do_not_divide(given, message):
    with pytest.raises(ValueError, match=message):
        group_sizes(settings(*given))


def test_evaluation_batches_hold_whole_groups():
    check_evaluation(16, 8)
    with pytest.raises(
        ValueError,
        match="num_generations_eval=8 must divide the 12",
    ):
        check_evaluation(12, 8)
