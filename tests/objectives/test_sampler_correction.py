"""Importance weights between sampler and trainer: hand-worked values of the four modes, metrics, bad input."""

import math

import pytest
import torch

from trl.objectives.sampler_correction import correction, correction_extremes, correction_metrics

# Two sequences of two tokens and a masked one; ratios 1.5 and 0.5, 2 and 3.
RATIOS = torch.tensor([1.5, 0.5, 2.0, 3.0, 9.0], dtype=torch.float64)
SEQUENCE, MASK = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 1, 1, 1, 0])


def corrected(mode, cap):
    logps = torch.full((5,), -1.0, dtype=torch.float64)
    return correction(logps, logps - RATIOS.log(), MASK, SEQUENCE, 2, mode=mode, cap=cap)


@pytest.mark.parametrize(
    ("mode", "cap", "factors"),
    [
        ("token_truncate", 1.75, [1.5, 0.5, 1.75, 1.75, 1]),
        ("token_mask", 1.75, [1.5, 0.5, 0, 0, 1]),
        ("sequence_truncate", 3.0, [0.75, 0.75, 3.0, 3.0, 1]),
        ("sequence_mask", 3.0, [0.75, 0.75, 0, 0, 1]),
        ("sequence_mask", 6.5, [0.75, 0.75, 6, 6, 1]),
    ],
)
def test_the_four_modes_by_hand(mode, cap, factors):
    expected = torch.tensor(factors, dtype=torch.float64)
    torch.testing.assert_close(corrected(mode, cap).factors, expected, atol=1e-12, rtol=1e-12)


def test_metrics_are_of_what_is_trained():
    found = corrected("token_mask", 1.75)
    means = {name: value.mean.item() for name, value in correction_metrics(found, MASK).items()}
    gaps = [abs(math.log(ratio)) for ratio in (1.5, 0.5, 2.0, 3.0)]
    assert means == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": sum(gaps) / 4,
            "sampling/importance_sampling_ratio/mean": 0.5,
        }
    )
    extremes = {name: value.item() for name, value in correction_extremes(found, MASK).items()}
    assert extremes == pytest.approx(
        {
            "sampling/sampling_logp_difference/max": math.log(3),
            "sampling/importance_sampling_ratio/min": 0.0,
            "sampling/importance_sampling_ratio/max": 1.5,
        }
    )
    of_sequences = correction_metrics(corrected("sequence_truncate", 10.0), MASK)
    assert of_sequences["sampling/importance_sampling_ratio/mean"].mean.item() == pytest.approx((0.75 + 6) / 2)


def test_nothing_trained_gives_no_extremes_and_factors_of_one():
    zero = torch.zeros(2)
    found = correction(zero, torch.full((2,), math.nan), zero, torch.tensor([0, 0]), 1)
    assert found.factors.tolist() == [1, 1]
    assert correction_extremes(found, zero) == {}
    assert correction_metrics(found, zero)["sampling/importance_sampling_ratio/mean"].count == 0


def test_an_enormous_ratio_stays_finite():
    logps, sampled = torch.zeros(1), torch.full((1,), -1000.0)
    for mode in ("token_truncate", "sequence_mask"):
        found = correction(logps, sampled, torch.ones(1), torch.zeros(1, dtype=torch.int64), 1, mode=mode)
        assert found.factors.isfinite().all()


def test_bad_input_is_named():
    one, row = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="sampling_logps must have shape"):
        correction(one, torch.zeros(2), one, row, 1)


def test_a_ratio_at_the_cap_is_kept_and_one_trained_token_counts():
    old = torch.zeros(2, dtype=torch.float64)
    new = torch.log(torch.tensor([2.0, 4.0], dtype=torch.float64))
    both, mask = torch.tensor([0, 1]), torch.ones(2)
    cap = new.exp()[0].item()
    assert correction(new, old, mask, both, 2, mode="token_mask", cap=cap).factors.tolist() == [cap, 0.0]
    found = correction(new, old, mask, both, 2, mode="sequence_truncate", cap=9.0)
    assert found.counted.tolist() == [True, True]
