"""RLOOTrainer: the divergence is paid for in the reward, and each completion is judged against the others."""

import logging

import pytest
import torch

from tests.trainer.grpo_runs import even_tokens, logs, make, run
from trl.rollouts.experience import ADVANTAGE, OLD, REF, REWARD, SCORES


def moved(**settings):
    """A trainer whose policy has left its reference."""
    trainer, _ = run("rloo", learning_rate=0.002, **settings)
    return trainer


def test_rewards_are_cut_then_pay_for_the_divergence_of_the_whole_completion():
    trainer = moved(beta=0.3, reward_clip_range=(0.4, 0.6))
    experience = trainer.make_rollout_batch(9)
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
    advantages = trainer.make_rollout_batch(0).per_row[ADVANTAGE]
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-12)
    assert float(advantages.std()) == pytest.approx(1, abs=2e-3)


def alike_after_the_first(completion_ids, trainer_state, **_):
    """Even tokens are wanted in the first step, and then everything is as good."""
    return even_tokens(completion_ids) if trainer_state.global_step == 0 else [0.5] * len(completion_ids)


def above_one(completion_ids, **_):
    return [1.0 + len(set(ids)) for ids in completion_ids]


def test_rewards_that_are_all_alike_are_spoken_of_whatever_the_price(caplog):
    """The divergence tells completions apart, so that they are trained; a metric of its own is of the rewards themselves."""
    with caplog.at_level(logging.WARNING, logger="trl"):
        trainer, keep = run("rloo", beta=0.05, max_steps=3, reward_funcs=alike_after_the_first)
    first, *later = logs(trainer)
    assert first["frac_given_reward_zero_std"] < 1
    for entry, gradients in zip(later, keep.steps[1:], strict=True):
        assert entry["frac_given_reward_zero_std"] == 1.0 > entry["frac_reward_zero_std"]
        assert any(value.any() for value in gradients.values())
    said = [record.getMessage() for record in caplog.records if "rewards of each group" in record.getMessage()]
    assert len(said) == 1 and "only differ by the KL penalty (beta=0.05)" in said[0]
    cut = {"reward_clip_range": (0.0, 0.1), "reward_funcs": above_one}
    assert logs(run("rloo", max_steps=1, **cut)[0])[0]["frac_given_reward_zero_std"] == 1.0
    assert "frac_given_reward_zero_std" not in logs(run("rloo", beta=0.0, max_steps=1)[0])[0]


def test_a_policy_like_its_reference_learns_nothing_from_equal_rewards():
    """Both log-probs come from the scoring forward: the rounding of another one would be an advantage."""
    equal = {"reward_funcs": lambda completion_ids, **_: [0.0] * len(completion_ids)}
    trainer, keep = run("rloo", dtype="float32", max_steps=1, **equal)
    assert trainer.sampler_is_exact and trainer.reference is not None
    (entry,) = logs(trainer)
    assert entry["frac_reward_zero_std"] == 1.0 and entry["tokens/trained"] == 0 and entry["kl"] == 0
    assert not any(value.any() for value in keep.steps[0].values())


def test_without_a_price_there_is_no_reference():
    trainer = moved(beta=0.0)
    assert trainer.reference is None and trainer.ref_model is None
    assert "kl" not in logs(trainer)[0]
