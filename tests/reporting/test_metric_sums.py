"""Sums and extremes between two logs."""

from types import SimpleNamespace

import pytest
import torch

from trl.reporting import metrics
from trl.reporting.metrics import MetricSums, RunningMean
from trl.tensors.reduce import Weighted

LONGEST = "completions/max_terminated_length"
GIVEN = [{"low_min": 0.1, LONGEST: float("nan")}, {"low_min": -0.3, LONGEST: -2.0}, {"low_min": float("nan")}]


def test_extremes_stay_on_the_device_until_a_log(monkeypatch):
    """A float would wait for the accelerator in every micro-batch."""
    sums, never = MetricSums(), MetricSums()
    with monkeypatch.context() as block:
        for name in ("__float__", "item", "tolist", "__bool__"):
            block.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
        for values in GIVEN:
            sums.add(extremes={name: torch.tensor(value) for name, value in values.items()})
    never.add(extremes={"high": torch.tensor(float("nan"))})
    assert never.drain() == {}
    expected = {"low_min": torch.tensor(-0.3).item(), LONGEST: -2.0}
    resumed = MetricSums()
    resumed.load_state(sums.state())
    assert sums.state()["extremes"] == sums.drain() == expected and sums.drain() == {}
    resumed.add(extremes={LONGEST: torch.tensor(-1.5), "low_min": torch.tensor(0.0)})
    assert resumed.drain() == {**expected, LONGEST: -1.5}


def test_extremes_of_all_processes(monkeypatch):
    monkeypatch.setattr(metrics, "gather_object", lambda own: [*own, {"low_min": -9.0, LONGEST: 3.0}])
    two = SimpleNamespace(num_processes=2, device="cpu", reduce=lambda table, reduction: table)
    sums = MetricSums()
    sums.add(extremes={"low_min": torch.tensor(0.0), LONGEST: torch.tensor(5.0)})
    assert sums.drain(two) == {"low_min": -9.0, LONGEST: 5.0}


def test_means_are_those_since_the_last_log_and_keep_their_digits():
    sums, one = MetricSums(), torch.tensor(1.0)
    for total in (torch.tensor(2.0**24), one):
        sums.add({"loss": Weighted(total, one)})
    sums.add({"nothing": Weighted(0 * one, 0 * one)})
    assert sums.drain() == {"loss": (2**24 + 1) / 2} and sums.drain() == {}


def test_a_running_mean_is_resumed():
    mean, resumed = RunningMean(), RunningMean()
    mean.add(Weighted(torch.tensor(3.0), torch.tensor(2.0)))
    resumed.load_state(mean.state())
    resumed.add(Weighted(torch.tensor(0.0), torch.tensor(2.0)))
    assert resumed.value == 0.75
