"""Sums and extremes between two logs."""

import pytest
import torch

from trl.reporting.metrics import MetricSums

GIVEN = [{"low_min": 0.1, "high": float("nan")}, {"low_min": -0.3, "high": -2.0}, {"low_min": float("nan")}]


def test_extremes_stay_on_the_device_until_a_log(monkeypatch):
    """A float would wait for the accelerator in every micro-batch."""
    sums, never = MetricSums(), MetricSums()
    with monkeypatch.context() as block:
        for name in ("__float__", "item", "tolist", "__bool__"):
            block.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
        for values in GIVEN:
            sums.add_extremes({name: torch.tensor(value) for name, value in values.items()})
    never.add_extremes({"high": torch.tensor(float("nan"))})
    assert never.drain() == {}
    expected = {"low_min": torch.tensor(-0.3).item(), "high": -2.0}
    resumed = MetricSums()
    resumed.load_state(sums.state())
    assert sums.state()["extremes"] == sums.drain() == expected and sums.drain() == {}
    resumed.add_extremes({"high": torch.tensor(-1.5), "low_min": torch.tensor(0.0)})
    assert resumed.drain() == {**expected, "high": -1.5}
