"""Which rows a window has and which of them a step learns from: every row its turn, for any number of processes."""

import pytest
import torch

from trl.rollouts.schedule import RolloutSizes, pass_order, rollout_rows, step_rows


@pytest.mark.parametrize(("dataset", "rows"), [(10, 4), (3, 8), (12, 12), (1, 5)])
def test_every_row_has_its_turn_in_every_pass(dataset, rows):
    stream = [row for window in range(12) for row in rollout_rows(window, rows, dataset=dataset, seed=1)]
    for start in range(0, len(stream) - dataset + 1, dataset):
        assert sorted(stream[start : start + dataset]) == list(range(dataset))


def test_passes_are_shuffled_by_the_seed():
    def first(seed):
        return [tuple(rollout_rows(window, 20, dataset=20, seed=seed)) for window in range(3)]

    assert first(0) == first(0)
    assert len({*first(0), *first(1)}) == 6


def test_passes_are_successive_draws_of_randperm():
    """As the recorded runs do (golden cases grpo/shuffled, rloo/shuffled). Any pass can be asked for at any time."""
    generator = torch.Generator().manual_seed(42)
    expected = [torch.randperm(16, generator=generator).tolist() for _ in range(4)]
    assert expected[0][:4] == [6, 3, 0, 7]  # the recorded runs' first prompts
    for number in (0, 1, 3, 3, 2, 0):
        assert pass_order(number, 16, seed=42) == expected[number]
        assert pass_order(number, 16, seed=7) != expected[number]


def sizes(processes, **changes):
    fields = {"rows": 24, "mini_batches": 3, "passes": 2, "micro_batches": 2, **changes}
    return RolloutSizes(processes=processes, **fields)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_mini_batches_are_the_same_for_any_number_of_processes(processes):
    whole = sizes(1)
    assert whole.steps == 6
    for step in range(whole.steps):
        expected = torch.cat(step_rows(step, whole, batch=5, process=0, seed=3)).tolist()
        cut = sizes(processes)
        found = [
            int(row) + process * cut.own_rows
            for process in range(processes)
            for row in torch.cat(step_rows(step, cut, batch=5, process=process, seed=3))
        ]
        assert sorted(found) == sorted(expected)
        assert len(found) == 8


def test_each_row_is_learned_from_once_in_a_pass():
    for first in (0, 3):
        turns = [step_rows(first + step, sizes(2), batch=0, process=1, seed=0) for step in range(3)]
        assert all(len(parts) == 2 and len(parts[0]) == len(parts[1]) == 2 for parts in turns)
        assert sorted(torch.cat([part for parts in turns for part in parts]).tolist()) == list(range(12))


@pytest.mark.parametrize("processes", [1, 2])
def test_groups_stay_together_where_they_go_round(processes):
    whole = sizes(1, rows=24, group=4)
    assert (whole.prompts, whole.together) == (6, 4)
    for step in range(whole.steps):
        expected = torch.cat(step_rows(step, whole, batch=2, process=0, seed=3))
        assert torch.equal(expected.view(-1, 4) % 4, torch.arange(4).expand(2, 4))
        cut = sizes(processes, rows=24, group=4)
        found = [
            row + process * cut.own_rows
            for process in range(processes)
            for row in torch.cat(step_rows(step, cut, batch=2, process=process, seed=3)).tolist()
        ]
        if cut.together == 4:
            assert found == expected.tolist()
    parts = sizes(2, rows=24, group=8)
    assert parts.together == 4  # four rows of each mini-batch on each process


def test_prompts_in_order():
    found = [rollout_rows(number, 3, dataset=5, seed=1, shuffle=False) for number in range(3)]
    assert found == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
