"""RepeatSampler: an order worked by hand, and the order in which trainers of groups draw their prompts."""

import pytest

from trl.rollouts.schedule import rollout_rows
from trl.trainer.utils import RepeatSampler


def test_an_order_worked_by_hand():
    """Seven rows in batches of three: each twice, each batch four times, the seventh left out."""
    sampler = RepeatSampler(range(7), mini_repeat_count=2, batch_size=3, repeat_count=4, shuffle=False)
    assert list(sampler) == [0, 0, 1, 1, 2, 2] * 4 + [3, 3, 4, 4, 5, 5] * 4
    assert len(sampler) == 48


def test_it_is_the_order_in_which_trainers_draw_their_prompts():
    sampler = RepeatSampler(range(6), mini_repeat_count=4, batch_size=2, repeat_count=1, seed=11)
    passes = [*sampler, *sampler]
    windows = [rollout_rows(number, 2, dataset=6, seed=11) for number in range(6)]
    assert passes[::4] == [row for rows in windows for row in rows]


@pytest.mark.parametrize("name", ["mini_repeat_count", "batch_size", "repeat_count"])
def test_counts_are_at_least_one(name):
    with pytest.raises(ValueError, match=f"{name} must be a whole number >= 1, got 0"):
        RepeatSampler(range(3), **{"mini_repeat_count": 1, name: 0})
