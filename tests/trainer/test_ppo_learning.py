"""Step-level PPO learns what it should: a bandit's known optimum, and to stay at the reference where that is all that counts."""

import pytest
import torch

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

ARMS, QUERY = 16, torch.tensor([5, 6, 7])


def log_probs(model):
    """Of the token after the query."""
    with torch.no_grad():
        return model(input_ids=QUERY[None])[0][0, -1].log_softmax(-1)


def play(score, *, seed, kl_coef, steps=40, rows=64, lr=8e-3, **more):
    """The reference's and the trained policy's log-probs of the arms; one token is a response, its score `score(arms)`."""
    torch.manual_seed(seed)
    inner = tiny_model("llama", seed=seed, vocab_size=ARMS)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(inner, summary_dropout_prob=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    config = PPOConfig(
        batch_size=rows,
        mini_batch_size=rows,
        ppo_epochs=2,
        seed=seed,
        init_kl_coef=kl_coef,
        adap_kl_ctrl=False,
        **more,
    )
    trainer = PPOTrainer(config, model, None, tiny_tokenizer(), optimizer=optimizer, lr_scheduler=schedule)
    reference = log_probs(trainer.ref_model)
    kwargs = {"max_new_tokens": 1, "do_sample": True, "top_k": 0, "eos_token_id": []}
    for _ in range(steps):
        arms = torch.cat(trainer.generate([QUERY] * rows, return_prompt=False, **kwargs))
        trainer.step([QUERY] * rows, list(arms[:, None]), score(arms))
    return reference, log_probs(trainer.model)


def optimum(reference, rewards, kl_coef):
    """Where reward less the penalty is largest: p proportional to p_ref exp(reward / kl_coef)."""
    return (reference + rewards / kl_coef).log_softmax(-1)


def worth(logps, reference, rewards, kl_coef):
    return float((logps.exp() * (rewards - kl_coef * (logps - reference))).sum())


def assert_reached(reference, found, rewards, kl_coef):
    """Within 0.01 of the best possible worth; the shortfall is kl_coef times the divergence from the best policy."""
    best = worth(optimum(reference, rewards, kl_coef), reference, rewards, kl_coef)
    assert worth(reference, reference, rewards, kl_coef) < best - 0.05
    assert worth(found, reference, rewards, kl_coef) > best - 0.01


@pytest.mark.parametrize("seed", range(2))
def test_a_bandit_with_a_function_as_reward(seed):
    rewards = torch.linspace(-1, 1, ARMS).roll(seed)
    reference, found = play(lambda arms: rewards[arms], seed=seed, kl_coef=0.5)
    assert_reached(reference, found, rewards, 0.5)
