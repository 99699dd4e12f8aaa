"""Pairs of ranked completions, schedules, and Nash-MD's gradient against enumeration."""

import itertools
import math

import pytest
import torch

from trl.objectives.online_preference import by_epoch, nash_advantages, ranked_pairs, sequence_metrics

NAN = math.nan


@pytest.mark.parametrize(
    ("scores", "size", "selection", "ties", "expected"),
    [
        ([1.0, 3.0, 2.0, 2.0], 2, "best_worst", "drop", [(1, 0, 1.0)]),
        ([1.0, 3.0, 2.0, 2.0], 2, "best_worst", "both", [(1, 0, 1.0), (2, 3, 0.5), (3, 2, 0.5)]),
        ([5.0, NAN, NAN, NAN], 2, "best_worst", "both", []),  # no opinion is no pair, and no tie with itself
        ([2.0, 9.0, NAN, 4.0], 4, "best_worst", "drop", [(1, 0, 1.0)]),
        ([2.0, 9.0, 2.0, NAN], 4, "all", "drop", [(1, 0, 1.0), (1, 2, 1.0)]),
        ([2.0, 9.0, 2.0, NAN], 4, "all", "both", [(1, 0, 1.0), (0, 2, 0.5), (2, 0, 0.5), (1, 2, 1.0)]),
        ([1.0, 2.0, 3.0], 3, "all", "drop", [(1, 0, 1.0), (2, 0, 1.0), (2, 1, 1.0)]),
        ([math.inf, -math.inf], 2, "best_worst", "drop", [(0, 1, 1.0)]),
    ],
)
def test_ranked_pairs(scores, size, selection, ties, expected):
    found = ranked_pairs(torch.tensor(scores), size, selection=selection, ties=ties)
    rows = list(zip(*(column.tolist() for column in found), strict=True))
    assert rows == expected


def test_completions_without_a_score_are_in_no_mean():
    columns = (torch.tensor(values) for values in ([-2.0, -3.0], [-1.0, -5.0], [1.0, NAN]))
    found = sequence_metrics(*columns, beta=0.5, with_scores=True)
    assert {name: value.mean.item() for name, value in found.items()} == {
        "objective/kl": -1.0, "objective/entropy": 2.0, "objective/non_score_reward": 0.5, "objective/scores": 1.0,
        "objective/rlhf_reward": 1.5,
    }  # fmt: skip


def test_a_schedule_has_one_value_for_each_epoch():
    assert [by_epoch([0.3, 0.2, 0.1], epoch) for epoch in (0.0, 0.999, 1.0, 2.7, 9.0)] == [
        0.3,
        0.3,
        0.2,
        0.1,
        0.1,
    ]
    assert by_epoch(0.5, 3.2) == 0.5


def test_nash_advantages_give_the_gradient_of_preference_less_divergence():
    """By enumeration of the 9 sequences of two tokens: the gradient of `E[P] - beta KL(policy | reference)`, to 1e-12."""
    generator, beta = torch.Generator().manual_seed(0), 0.3
    first, second, ref_first, ref_second = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 3)) * 2
    )
    preference = torch.rand(3, 3, generator=generator, dtype=torch.float64)  # of each sequence over the opponent
    parameters = [first.requires_grad_(), second.requires_grad_()]
    logps = first.log_softmax(0)[:, None] + second.log_softmax(1)
    ref_logps = ref_first.log_softmax(0)[:, None] + ref_second.log_softmax(1)
    objective = (logps.exp() * (preference - beta * (logps - ref_logps))).sum()
    expected = torch.autograd.grad(objective, parameters)

    surrogate = torch.zeros((), dtype=torch.float64)
    for a, b in itertools.product(range(3), range(3)):
        tokens = torch.stack([first.log_softmax(0)[a], second.log_softmax(1)[a, b]])
        gaps = tokens.detach() - torch.stack([ref_first.log_softmax(0)[a], ref_second.log_softmax(1)[a, b]])
        advantages = nash_advantages(preference[a, b][None], gaps, torch.tensor([0, 0]), beta=beta)
        surrogate = surrogate + logps[a, b].detach().exp() * (advantages * tokens).sum()
    found = torch.autograd.grad(surrogate, parameters)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)
