"""The methods of 0.26 that replace groups in padded tensors: calls and overrides of them are refused."""

import pytest

from tests.experimental import group_runs
from tests.trainer import grpo_runs
from trl.experimental.grpo_with_replay_buffer import GRPOWithReplayBufferTrainer

NAMES = ("slice_group_data", "update_replay_buffer", "sample_from_replay_buffer", "update_with_replay_buffer")


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_refused(name):
    trainer = group_runs.make("replay")[0]
    with pytest.raises(RuntimeError, match="ReplayBuffer"):
        getattr(trainer, name)()


@pytest.mark.parametrize("name", NAMES)
def test_overrides_are_refused(name, monkeypatch):
    """Training does not call these methods, unless the subclass overrides the method that may call them."""
    kind = type("Mine", (GRPOWithReplayBufferTrainer,), {name: lambda self, *args, **kwargs: None})
    config = grpo_runs.TRAINERS["replay"][0]
    monkeypatch.setitem(grpo_runs.TRAINERS, "mine", (config, kind))
    with pytest.raises(
        TypeError, match=f"Mine overrides {name}, which training does not call. Override make_rollout_batch"
    ):
        group_runs.make("mine")
    kind.make_rollout_batch = lambda self, number: None
    group_runs.make("mine")
