"""Two optimiser steps of PPO against the same written out in bare torch, row by row, from the logits."""

import copy

import pytest
import torch

from tests.experimental.ppo_runs import END, logs, make
from tests.tiny import tiny_classifier, tiny_model

KL, T, PENALTY, LAM, GAMMA, CLIP, VF = 0.2, 0.8, 0.5, 0.9, 0.97, 0.2, 0.3
SETTINGS = {
    "per_device_train_batch_size": 6, "num_mini_batches": 1, "num_ppo_epochs": 2, "max_steps": 2, "kl_coef": KL,
    "temperature": T, "missing_eos_penalty": PENALTY, "lam": LAM, "gamma": GAMMA, "cliprange": CLIP, "vf_coef": VF,
    "cliprange_value": 0.3, "learning_rate": 0.05,
}  # fmt: skip


def logps_of(model, prompt, completion):
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / T
    whole = logits.log_softmax(-1)
    entropy = -(whole.exp() * whole).sum(-1)
    return whole.gather(1, torch.tensor(completion)[:, None])[:, 0], entropy


def values_of(model, prompt, completion):
    hidden = model.transformer(torch.tensor([prompt + completion])).last_hidden_state[0]
    return model.score(hidden[len(prompt) - 1 : -1])[:, 0]


def advantages_of(rewards, values):
    found, carried, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        carried = reward + GAMMA * following - value + GAMMA * LAM * carried
        following = value
        found.insert(0, carried)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("whitened", [False, True])
def test_two_steps_in_bare_torch(estimator, whitened):
    reference = tiny_model("gpt2", dtype=torch.float64, seed=5)
    policy = tiny_model("gpt2", dtype=torch.float64)
    value = tiny_classifier("gpt2", dtype=torch.float64, num_labels=1, seed=3)
    scores = [1.0, -0.5, 0.25, 2.0, 0.0, -1.0]
    seen = []

    def reward(prompt_ids, completion_ids, **_):
        seen.extend(zip(prompt_ids, completion_ids, strict=True))
        return scores

    trainer, keep = make(
        copy.deepcopy(policy), ref_model=reference, value_model=copy.deepcopy(value), reward_funcs=reward,
        kl_estimator=estimator, whiten_rewards=whitened, **SETTINGS,
    )  # fmt: skip
    end = trainer.processing_class.eos_token_id
    trainer.train()
    assert trainer.processing_class.convert_ids_to_tokens(end) == END
    lengths = [len(completion) for _, completion in seen]
    assert len(seen) == 6 and len(set(lengths)) > 1, lengths

    # the batch of rollouts, with the models as they were
    with torch.no_grad():
        old = [logps_of(policy, *row)[0] for row in seen]
        ref = [logps_of(reference, *row)[0] for row in seen]
        old_values = [values_of(value, *row) for row in seen]
    kls = [o - r if estimator == "k1" else (r - o).exp() - 1 - (r - o) for o, r in zip(old, ref, strict=True)]
    final = [s - PENALTY * (end not in row[1]) for s, row in zip(scores, seen, strict=True)]
    rewards = [-KL * kl for kl in kls]
    for row, score in zip(rewards, final, strict=True):
        row[-1] += score
    if whitened:
        flat = torch.cat(rewards)
        rewards = [(row - flat.mean()) / (flat.var() + 1e-8).sqrt() + flat.mean() for row in rewards]
    raw = [advantages_of(*both) for both in zip(rewards, old_values, strict=True)]
    returns = torch.cat([a + v for a, v in zip(raw, old_values, strict=True)])
    flat = torch.cat(raw)
    advantages = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()
    old, old_values = torch.cat(old), torch.cat(old_values)

    found = logs(trainer)
    expected = {
        "objective/kl": sum(kl.sum() for kl in kls) / 6,
        "objective/entropy": -old.sum() / 6,
        "objective/non_score_reward": -KL * sum(kl.sum() for kl in kls) / 6,
        "objective/scores": sum(final) / 6,
        "objective/rlhf_reward": (sum(final) - KL * sum(kl.sum() for kl in kls)) / 6,
        "val/num_eos_tokens": sum(row[1].count(end) for row in seen),
        "episode": 6,
        "lr": 0.05,
    }
    for log in found:
        assert {name: log[name] for name in expected} == pytest.approx(
            {name: float(wanted) for name, wanted in expected.items()}, rel=1e-9
        )

    for step in range(2):
        scored = [logps_of(policy, *row) for row in seen]
        logps, entropies = torch.cat([s[0] for s in scored]), torch.cat([s[1] for s in scored])
        vpreds = torch.cat([values_of(value, *row) for row in seen])
        ratio = (logps - old).exp()
        plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
        cut = torch.clamp(vpreds, old_values - 0.3, old_values + 0.3)
        errors = (vpreds - returns).square(), (cut - returns).square()
        policy_loss, value_loss = torch.max(plain, clipped).mean(), 0.5 * torch.max(*errors).mean()
        loss = policy_loss + VF * value_loss
        both = {**{f"policy.{n}": p for n, p in policy.named_parameters()}, **{f"value_model.{n}": p for n, p in value.named_parameters()}}  # fmt: skip
        gradients = dict(zip(both, torch.autograd.grad(loss, list(both.values())), strict=True))
        size = max(gradient.abs().max() for gradient in gradients.values())
        for name, gradient in gradients.items():
            assert (keep.steps[step][name] - gradient).abs().max() <= 1e-9 * size, (step, name)
        expected = {
            "loss/policy_avg": policy_loss,
            "loss/value_avg": value_loss,
            "policy/approxkl_avg": 0.5 * (logps - old).square().mean(),
            "policy/clipfrac_avg": (clipped > plain).double().mean(),
            "val/clipfrac_avg": (errors[1] > errors[0]).double().mean(),
            "policy/entropy_avg": entropies.mean(),
            "val/ratio": ratio.mean(),
            "val/ratio_var": ratio.var(unbiased=False),
        }
        named = {name: found[step][name] for name in expected}
        assert named == pytest.approx({name: wanted.item() for name, wanted in expected.items()}, rel=1e-8, abs=1e-12)
        assert found[step]["loss"] == pytest.approx(loss.item(), abs=1e-6)
        with torch.no_grad():
            for name, parameter in both.items():
                parameter -= 0.05 * gradients[name]
