"""GSPO-token: the gradient of GSPO where a completion has one advantage, each token's own where it has several."""

import torch

from tests.trainer import grpo_runs
from tests.trainer.grpo_runs import run
from tests.trainer.one_step import assert_same_steps
from trl.experimental.gspo_token import GRPOTrainer
from trl.rollouts.experience import ADVANTAGE

SETTINGS = {"num_iterations": 3, "epsilon": 0.02, "max_steps": 6, "learning_rate": 0.02}


def test_it_is_the_trainer_that_knows_all_levels():
    from trl import GRPOTrainer as plain

    assert GRPOTrainer is plain


def test_one_advantage_per_completion_is_gspo():
    """In float64 to 1e-10, off-policy steps with clipped ratios included."""
    for loss_type in ("grpo", "dapo"):
        trainer, expected = run(importance_sampling_level="sequence", loss_type=loss_type, **SETTINGS)
        other, found = run(importance_sampling_level="sequence_token", loss_type=loss_type, **SETTINGS)
        assert_same_steps(found.steps, expected.steps)
        clipped = [log["clip_ratio/region_mean"] for log in grpo_runs.logs(trainer)]
        assert max(clipped) > 0
        assert [log["loss"] for log in grpo_runs.logs(other)] == [log["loss"] for log in grpo_runs.logs(trainer)]


class FirstTokensAlone(GRPOTrainer):
    """Credits the first token of each completion with all of its advantage."""

    def advantages(self, experience, *, group_size=None):
        experience = super().advantages(experience, group_size=group_size)
        index = experience.completions.row_index
        first = torch.cat([torch.ones(1, dtype=torch.bool), index[1:] != index[:-1]])
        return experience.with_tokens(**{ADVANTAGE: experience.per_row[ADVANTAGE][index] * first})


def test_advantages_per_token_are_credited_to_their_own_tokens(monkeypatch):
    """At the first step every ratio is 1: each token's gradient is its advantage times that of its log-prob."""
    config = grpo_runs.TRAINERS["grpo"][0]
    monkeypatch.setitem(grpo_runs.TRAINERS, "first", (config, FirstTokensAlone))
    settings = {"max_steps": 1, "beta": 0.0, "loss_type": "dr_grpo"}
    _, expected = run("first", importance_sampling_level="token", **settings)
    _, found = run("first", importance_sampling_level="sequence_token", **settings)
    assert_same_steps(found.steps, expected.steps)
    _, shared = run("first", importance_sampling_level="sequence", **settings)  # spread over the completion
    scale = max(float(value.abs().max()) for value in expected.steps[0].values())
    gaps = [(shared.steps[0][n] - v).abs().max() for n, v in expected.steps[0].items()]
    assert max(gaps) > 0.01 * scale
