"""RLOOTrainer: the divergence is paid for in the reward, and each completion is judged against the others."""

import pytest
import torch

from tests.trainer.grpo_runs import logs, make, run
from trl.trainer.group_measures import REWARD
from trl.trainer.group_trainer import ADVANTAGE, REF
from trl.trainer.online_trainer import OLD, SCORES


def moved(**settings):
    """A trainer whose policy has left its reference."""
    trainer, _ = run("rloo", learning_rate=0.002, **settings)
    return trainer


def test_rewards_are_cut_then_pay_for_the_divergence_of_the_whole_completion():
    trainer = moved(beta=0.3, reward_clip_range=(0.4, 0.6))
    experience = trainer.make_window(9)
    gaps = experience.per_token[OLD] - experience.per_token[REF]
    kl = torch.stack([part.sum() for part in gaps.split(experience.completions.lengths.tolist())])
    assert kl.abs().max() > 1e-3
    expected = experience.per_row[SCORES].clamp(0.4, 0.6) - 0.3 * kl
    torch.testing.assert_close(experience.per_row[REWARD], expected, rtol=0, atol=1e-12)
    groups = expected.view(-1, 4)
    others = (groups.sum(dim=1, keepdim=True) - groups) / 3
    torch.testing.assert_close(experience.per_row[ADVANTAGE], (groups - others).flatten(), rtol=0, atol=1e-12)


def test_advantages_of_the_batch_are_normalised():
    trainer, _ = make("rloo", normalize_advantages=True)
    advantages = trainer.make_window(0).per_row[ADVANTAGE]
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-12)
    assert float(advantages.std()) == pytest.approx(1, abs=2e-3)


def test_without_a_price_there_is_no_reference():
    trainer = moved(beta=0.0)
    assert trainer.reference is None and trainer.ref_model is None
    assert "kl" not in logs(trainer)[0]


def test_the_policy_learns_which_tokens_are_wanted():
    trainer, _ = make(
        "rloo", max_steps=60, beta=0.0, learning_rate=0.02, optim="adamw_torch", max_completion_length=4,
        per_device_train_batch_size=16, dtype="float32", max_grad_norm=1.0,
    )  # fmt: skip
    trainer.train()
    rewards = [entry["reward"] for entry in logs(trainer)]
    assert sum(rewards[:3]) < 3 * 0.75 and min(rewards[-5:]) > 0.95
