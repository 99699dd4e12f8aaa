"""Every sampled token is in one bucket, and the sums match."""

import pytest
import torch

from trl.rollouts.token_counts import BUCKETS, token_ledger


def test_the_first_bucket_that_claims_a_token_has_it():
    claims = {
        name: torch.tensor([True] * (number + 1) + [False] * (6 - number))
        for number, name in enumerate(BUCKETS[:5])
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


def test_nothing_claimed_is_trained_or_of_zero_advantage():
    assert token_ledger(torch.tensor([0.0, 2.0]), {}).tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_an_advantage_that_is_nan_must_not_count():
    nan = torch.tensor([float("nan"), 1.0])
    with pytest.raises(ValueError, match=r"Mark those tokens as reward_failed"):
        token_ledger(nan, {})
    assert token_ledger(nan, {"reward_failed": nan.isnan()})[BUCKETS.index("reward_failed")] == 1
