"""KL penalties and estimators against the divergence itself, and the controllers of their coefficient."""

import pytest
import torch

from trl.objectives.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    full,
    k3,
    kl_penalty,
)


@pytest.fixture
def distributions():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 12, generator=generator, dtype=torch.float64).log_softmax(-1)


def expected_of(estimator, p, q):
    return (p.exp() * estimator(p, q)).sum()


def test_full_is_the_divergence(distributions):
    p, q = distributions
    torch.testing.assert_close(full(p, q), torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum"))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(distributions, kind):
    p, q = distributions
    torch.testing.assert_close(expected_of(KL_ESTIMATORS[kind], p, q), full(p, q), rtol=1e-12, atol=1e-12)


def test_k3_does_not_overflow():
    found = k3(torch.tensor([-1e4]), torch.tensor([-1.0]))
    assert torch.isfinite(found).all()
    assert found.item() > 1e8


@pytest.mark.parametrize(("kind", "expected"), [("kl", -0.5), ("abs", 0.5), ("mse", 0.125), ("k2", 0.125)])
def test_penalties_by_name(kind, expected):
    assert kl_penalty(torch.tensor([[-2.0]]), torch.tensor([[-1.5]]), kind).tolist() == [[expected]]


def test_unknown_names_and_unlike_shapes_are_errors():
    one = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"unknown kl_penalty 'squared'.*'abs', 'full'"):
        kl_penalty(one, one, "squared")
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(1, 3\)"):
        kl_penalty(one, torch.zeros(1, 3), "kl")


def test_the_controller_moves_towards_its_target_by_at_most_a_fifth_per_horizon():
    for kl, factor in ((6.3, 1.005), (600.0, 1.02)):
        controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
        controller.update(kl, 100)
        assert controller.value == pytest.approx(0.2 * factor)
    controller = AdaptiveKLController(0.2, target=6, horizon=10000)
    controller.update(-1.2642, 4)
    assert controller.value == pytest.approx(0.199984, rel=1e-9)  # as recorded
    fixed = FixedKLController(0.2)
    fixed.update(100.0, 4)
    assert fixed.value == 0.2


@pytest.mark.parametrize("name", ["target", "horizon"])
def test_a_target_that_is_not_positive_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name} must be > 0, got 0"):
        AdaptiveKLController(0.2, **{"target": 6, "horizon": 100, name: 0})
