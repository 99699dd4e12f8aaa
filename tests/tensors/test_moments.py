"""Moments that come in parts equal those of the whole, and whitening by them."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from trl.tensors.moments import RunningMoments, get_global_statistics, moments, over_processes, whiten_by
from trl.tensors.statistics import masked_whiten

ALONE = SimpleNamespace(num_processes=1)


class Several:
    """An accelerator that gathers what the other processes hold."""

    def __init__(self, *others):
        self.others, self.num_processes, self.device = others, 1 + len(others), "cpu"

    def gather(self, part):
        return torch.cat([part, *(torch.stack(list(moments(other)))[None] for other in self.others)])


def values(*, offset=0.0):
    return offset + torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("size", [1, 7, 39])
def test_parts_give_the_moments_of_the_whole(size, offset):
    every = values(offset=offset)
    whole = moments(every[:0])
    for part in every.split(size):
        whole = whole.plus(moments(part))
    torch.testing.assert_close(whole.mean, every.mean(), rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(whole.variance, every.var(), rtol=1e-8, atol=0)


def test_whitening_by_the_moments_of_all_processes():
    every = values().float()
    mine, theirs = every[:15], every[15:]
    found = whiten_by(mine, over_processes(moments(mine), Several(theirs)))
    torch.testing.assert_close(found, masked_whiten(every, torch.ones(40))[:15], rtol=1e-5, atol=1e-6)
    kept = whiten_by(mine, moments(mine), shift_mean=False)
    torch.testing.assert_close(kept.mean(), mine.mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kept.std(), torch.tensor(1.0), rtol=1e-5, atol=1e-6)


def test_one_value_cannot_be_whitened():
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        whiten_by(torch.ones(1), moments(torch.ones(1)))


def test_running_moments_of_two_updates_are_those_of_both():
    every, running = values(), RunningMoments(ALONE)
    first = running.update(every[:4])
    assert first == pytest.approx((every[:4].mean().item(), every[:4].std().item()))
    assert running.std == pytest.approx(every[:4].std().item())
    running.update(every[4:])
    assert (running.mean, running.std, running.count) == pytest.approx((every.mean().item(), every.std().item(), 40))
    assert running.var == pytest.approx(every.var(unbiased=False).item())


def test_running_moments_over_processes_and_in_a_file(tmp_path):
    every = values()
    running = RunningMoments(Several(every[10:25], every[25:]))
    running.update(every[:10])
    assert running.std == pytest.approx(every.std().item())
    path = str(tmp_path / "moments.json")
    running.save_to_json(path)
    with open(path, encoding="utf-8") as file:
        assert set(json.load(file)) == {"mean", "std", "var", "count"}
    assert RunningMoments.load_from_json(running.accelerator, path) == running


def test_a_nan_leaves_them_as_they_were():
    running = RunningMoments(ALONE)
    running.update(values())
    before = copy.copy(running)
    with pytest.raises(ValueError, match="finite"):
        running.update(torch.tensor([1.0, float("nan")]))
    assert running == before


def test_global_statistics():
    mean, variance, count = get_global_statistics(ALONE, torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))
    assert (mean.item(), variance.item(), count) == (2.0, 1.0, 2)
