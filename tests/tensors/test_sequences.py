import math

import pytest
import torch

from trl.tensors.sequences import (
    alignment_by_sequence,
    length_desensitized,
    mean_by_sequence,
    positions_in_sequence,
    sum_by_sequence,
    tokens_by_sequence,
    wpo_weights,
)

# Two pairs: lengths 3 and 1, then 1 and 2.
LOGPS = [-1.0, -2.0, -4.0, -8.0, -0.5, -3.0, -5.0]
SEQUENCE = torch.tensor([0, 0, 0, 1, 2, 3, 3])


def logps(dtype=torch.float64):
    return torch.tensor(LOGPS, dtype=dtype, requires_grad=True)


def test_sums_means_and_lengths():
    assert sum_by_sequence(logps(), SEQUENCE, 4).tolist() == [-7.0, -8.0, -0.5, -8.0]
    assert tokens_by_sequence(SEQUENCE, 5).tolist() == [3, 1, 1, 2, 0]
    assert mean_by_sequence(logps(), SEQUENCE, 5).tolist() == pytest.approx([-7 / 3, -8.0, -0.5, -4.0, 0.0])


def test_the_gradient_of_a_sum_reaches_its_own_tokens():
    leaf = logps()
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    gradient = torch.autograd.grad((sum_by_sequence(leaf, SEQUENCE, 4) * weights).sum(), leaf)[0]
    assert gradient.tolist() == [1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 4.0]


def test_tokens_may_come_in_any_order():
    order = torch.tensor([6, 3, 0, 5, 2, 4, 1])
    torch.testing.assert_close(
        sum_by_sequence(logps()[order], SEQUENCE[order], 4), sum_by_sequence(logps(), SEQUENCE, 4)
    )
    assert positions_in_sequence(torch.tensor([1, 0, 1, 1, 0]), 3).tolist() == [0, 0, 1, 2, 1]


def test_sums_of_single_and_half_precision_are_exact():
    """A log-ratio is the small difference of two long sums: in float32 the sums below would be off by up to 1e-2."""
    values = torch.rand(3000, generator=torch.Generator().manual_seed(0)) * -8
    for dtype in (torch.float32, torch.bfloat16):
        total = sum_by_sequence(values.to(dtype), torch.zeros(3000, dtype=torch.int64), 1)
        assert total.item() == pytest.approx(math.fsum(values.to(dtype).tolist()), abs=1e-9)


def test_length_desensitized_by_hand():
    """Pair 0 keeps 1 token of 3 whole: -1 + 0.25 (-2 - 4) = -2.5; pair 1 keeps 1 of 2: -3 + 0.25 (-5) = -4.25."""
    found = length_desensitized(logps(), SEQUENCE, 4, alpha=0.25)
    assert found.tolist() == [-2.5, -8.0, -0.5, -4.25]


def test_length_desensitized_scales_the_gradient_of_the_rest():
    leaf = logps()
    gradient = torch.autograd.grad(length_desensitized(leaf, SEQUENCE, 4, alpha=0.25).sum(), leaf)[0]
    assert gradient.tolist() == [1.0, 0.25, 0.25, 1.0, 1.0, 1.0, 0.25]


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_length_desensitized_outside_its_range(alpha):
    with pytest.raises(ValueError, match=r"ld_alpha must be in \[0, 1\], got"):
        length_desensitized(logps(), SEQUENCE, 4, alpha=alpha)


def test_weights_of_pairs_by_hand():
    """Two tokens of p = 1/2 and 1/4 under (1/2, 1/4, 1/4), whose sum of squares is 3/8: mean of log 4/3, log 2/3."""
    chosen = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
    collision = torch.full((2,), 0.375, dtype=torch.float64)
    found = alignment_by_sequence(chosen.log(), collision.log(), torch.zeros(2, dtype=torch.int64), 1)
    assert found.item() == pytest.approx((math.log(4 / 3) + math.log(2 / 3)) / 2) and not found.requires_grad
    assert wpo_weights(found, found).item() == pytest.approx(8 / 9)
    assert wpo_weights(-found, -found).item() == 1.0
