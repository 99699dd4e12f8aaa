"""Every sampled token is in one bucket, and the sums match."""

from types import SimpleNamespace

import pytest
import torch

from trl.rollouts.experience import (
    ADVANTAGE,
    CORRECTION,
    FILTERED,
    REPLAYED,
    SCORES,
    STOPPED,
    TOOL_OUTPUT,
    TRAINED,
    Experience,
)
from trl.rollouts.token_counts import BUCKETS, TokenCounts, token_advantages, token_ledger
from trl.tensors.ragged import Ragged


def test_the_first_bucket_that_claims_a_token_has_it():
    claims = {
        name: torch.tensor([True] * (number + 1) + [False] * (6 - number)) for number, name in enumerate(BUCKETS[:5])
    }
    found = token_ledger(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, -1.0]), claims)
    assert found.tolist() == [1] * len(BUCKETS)


@pytest.mark.parametrize("seed", range(5))
def test_sums_match_whatever_overlaps(seed):
    generator = torch.Generator().manual_seed(seed)
    claims = {name: torch.rand(500, generator=generator) < 0.3 for name in BUCKETS[:5]}
    advantages = torch.randint(-1, 2, (500,), generator=generator).float()
    found = token_ledger(advantages, claims)
    assert found.sum() == 500
    free = ~torch.stack(list(claims.values())).any(dim=0)
    assert found[-1] == (free & (advantages != 0)).sum()
    # Rows of two processes add up to those of one.
    halves = [
        token_ledger(advantages[part], {k: v[part] for k, v in claims.items()})
        for part in (slice(200), slice(200, 500))
    ]
    assert (halves[0] + halves[1]).equal(found)


def test_an_advantage_that_is_nan_must_not_count():
    nan = torch.tensor([float("nan"), 1.0])
    with pytest.raises(ValueError, match=r"Mark those tokens as reward_failed"):
        token_ledger(nan, {})
    assert token_ledger(nan, {"reward_failed": nan.isnan()})[BUCKETS.index("reward_failed")] == 1


ALONE = SimpleNamespace(num_processes=1)


def counted():
    """Seven rows, each of whose tokens are of another kind; and their counts."""
    lengths = [3, 1, 3, 2, 1, 2, 2]
    rows = Experience(Ragged.of([[1, 2]] * 7), Ragged.of([[5] * length for length in lengths]))
    index = rows.completions.row_index

    def of_row(number):
        return torch.arange(7) == number

    per_row = {
        ADVANTAGE: torch.tensor([1.0, 0.0, torch.nan, 1.0, 1.0, 1.0, -1.0]),
        SCORES: torch.tensor([1.0, 0.5, torch.nan, 1.0, 1.0, 1.0, 0.0]),
        STOPPED: ~of_row(3), REPLAYED: of_row(4), FILTERED: of_row(5),
    }  # fmt: skip
    tool, correction = torch.zeros(14, dtype=torch.bool), torch.ones(14)
    tool[1], correction[13] = True, 0.0  # of the first row, and of the last
    columns = {TOOL_OUTPUT: tool, CORRECTION: correction, TRAINED: ~tool & (index != 3) & (index != 5)}
    return rows.with_rows(**per_row).with_tokens(**columns)


def test_each_token_of_a_rollout_batch_is_counted_once():
    sampled, rows = list[torch.Tensor](), counted()
    advantages, counts = token_advantages(rows), TokenCounts(ALONE, sampled.append, masks_truncated=True)
    expected = {
        TOOL_OUTPUT: 1, "reward_failed": 3, "truncated": 2, FILTERED: 2, "masked": 1, "zero_advantage": 1, "trained": 3,
    }  # fmt: skip
    assert counts.add(rows, advantages) == expected
    assert counts.state() == expected and sampled == [torch.tensor(13 + 6 * 2)]
    chosen = torch.ones(14, dtype=torch.bool)
    chosen[[0, 3]] = False  # a trained token, and one without advantage
    counts.mask(rows, chosen)
    moved = {**expected, "masked": 3, "zero_advantage": 0, "trained": 2}
    assert counts.logged() == {f"tokens/{name}": float(n) for name, n in moved.items() if n}
    two = SimpleNamespace(num_processes=2, device="cpu", reduce=lambda found, reduction: 2 * found)
    both = TokenCounts(two, sampled.append, masks_truncated=True).add(rows, advantages)
    assert both == {name: 2 * n for name, n in expected.items()}
    again = TokenCounts(ALONE, sampled.append, masks_truncated=False)
    again.load_state({"trained": 3})  # of a run that knew fewer buckets
    assert again.state() == {**dict.fromkeys(BUCKETS, 0), "trained": 3}
    again.load_state(counts.state())
    again.discard(rows)
    assert again.state()["masked"] == 3 + 2 + 1 and again.state()["trained"] == 2


def test_a_batch_without_a_trained_token_is_said_once_for_each_reason(caplog):
    counts, nothing = TokenCounts(ALONE, print, masks_truncated=False), dict.fromkeys(BUCKETS, 0)
    for added in (nothing, {**nothing, "trained": 1, "masked": 5}, {**nothing, FILTERED: 3}):
        counts.warn_untrained(added)
    assert not caplog.records
    for added in (
        {"masked": 2, "zero_advantage": 3},
        {"zero_advantage": 4},
        {"masked": 2, "zero_advantage": 1},
    ):
        counts.warn_untrained({**nothing, **added})
    assert [record.args[-1] for record in caplog.records] == ["zero_advantage", "masked"]
    for _ in range(2):
        counts.warn_only_kl_differs(0.1, metric="frac")
    assert [record.args[-1] for record in caplog.records[2:]] == ["frac"]
