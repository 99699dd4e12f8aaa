"""One batch of rollouts gives one set of updates, however it is cut, laid out, scored or spread over processes.

float64 throughout: eight optimiser steps (two batches of rollouts, each two passes of two mini-batches); gradients
agree to 1e-10 of the largest, logs to 1e-9.
"""

import json

import pytest
import torch

from tests.experimental.ppo_runs import VOLATILE, logs, prompts, run
from tests.two_processes import launch
from trl.models.scoring import base as scorer_base
from trl.models.scoring import causal as forward
from trl.trainer import online_trainer

CUTS = {
    "micro-batches of 4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "micro-batches of 1": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "no shared prompts": {"prefix_sharing": False},
    "scored one by one": {"local_rollout_forward_batch_size": 1},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def whole():
    return run()


def assert_same(found, expected):
    """Gradients of every step, and logs."""
    assert len(found["gradients"]) == len(expected["gradients"]) == 8
    for step, wanted in enumerate(expected["gradients"]):
        size = max(gradient.abs().max() for gradient in wanted.values())
        assert size > 1e-3
        for name, gradient in wanted.items():
            assert (found["gradients"][step][name] - gradient).abs().max() <= 1e-10 * size, (step, name)
    for one, other in zip(found["logs"], expected["logs"], strict=True):
        assert one.pop("loss") == pytest.approx(other["loss"], abs=1e-6)  # transformers sums it in float32
        wanted = {name: value for name, value in other.items() if name != "loss"}
        assert one == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def of(pair):
    trainer, keep = pair
    return {"gradients": keep.steps, "logs": logs(trainer)}


@pytest.mark.parametrize("cut", CUTS)
def test_cuts(cut, whole):
    assert_same(of(run(**CUTS[cut])), of(whole))


def test_padded_rows(whole, monkeypatch):
    monkeypatch.setattr(scorer_base, "flat_obstacle", lambda model: "of this test")
    trainer, keep = run()
    assert not trainer.scorer.flat
    assert_same(of((trainer, keep)), of(whole))


def test_models_scored_from_their_own_logits(whole, monkeypatch):
    monkeypatch.setattr(forward, "head_obstacle", lambda core, rule: "of this test")
    assert_same(of(run()), of(whole))


def test_policies_scored_before_the_loss_is_known(whole, monkeypatch):
    monkeypatch.setattr(online_trainer, "is_overridden_with", lambda *names: False)
    assert_same(of(run()), of(whole))


def test_old_log_probs_of_the_sampler_are_those_of_a_scoring_pass(whole, monkeypatch):
    from trl.trainer.online_trainer import OnlineTrainer

    assert whole[0].sampler_is_exact
    monkeypatch.setattr(OnlineTrainer, "sampler_is_exact", property(lambda self: False))
    assert_same(of(run()), of(whole))


def test_two_processes(whole, tmp_path):
    out = tmp_path / "two.pt"
    launch("tests.experimental.ppo_runs", str(out), json.dumps({"per_device_train_batch_size": 4}))
    found = torch.load(out, weights_only=False)
    assert_same(found, of(whole))
    metrics = whole[0].evaluate(prompts(4))
    expected = {name: value for name, value in metrics.items() if name not in VOLATILE}
    assert found["eval"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
