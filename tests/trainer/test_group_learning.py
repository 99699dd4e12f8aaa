"""GRPO, GSPO and RLOO learn what they are paid for: a bandit with a known optimum, and sums after fine-tuning."""

import copy

import pytest
import torch
from datasets import Dataset
from examples import arithmetic_rl

from tests.experimental.test_ppo_learning import ACTIONS, FLAT, PRICE, PROMPTS, distributions
from tests.tiny import tiny_model
from tests.trainer.grpo_runs import make

GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
METHODS = {"grpo": ("grpo", {}), "gspo": ("grpo", GSPO), "rloo": ("rloo", {})}


def bandit(method: str, *, price: float, seed: int) -> tuple[float, float, float]:
    """One token is drawn for each of two prompts. The worth of the start, of what was learned, and of the best policy: mean
    reward less the price of the divergence."""
    policy = tiny_model("gpt2", seed=seed, **FLAT)
    table = torch.randn(len(PROMPTS), ACTIONS, generator=torch.Generator().manual_seed(seed)).double()

    def reward(prompt_ids, completion_ids, **_):
        numbers = [PROMPTS.index(prompt) for prompt in prompt_ids]
        return [table[n, ids[0]].item() for n, ids in zip(numbers, completion_ids, strict=True)]

    start = distributions(copy.deepcopy(policy))
    name, settings = METHODS[method]
    trainer, _ = make(
        name, reward_funcs=reward, dtype="float32", data=Dataset.from_dict({"input_ids": list(PROMPTS) * 4}), given={"model": policy},
        beta=price, max_completion_length=1, per_device_train_batch_size=32, steps_per_generation=2, num_generations=8,
        max_steps=60, learning_rate=1.5e-2, optim="adamw_torch", lr_scheduler_type="linear", max_grad_norm=1.0, logging_steps=1000,
        seed=seed, **settings,
    )  # fmt: skip
    trainer.train()
    end = distributions(policy)
    kl = (end.exp() * (end - start)).sum(1)
    worth = ((end.exp() * table).sum(1) - price * kl).mean().item()
    best = (price * torch.logsumexp(start + table / price, 1) if price else table.max(dim=1).values).mean()
    return (start.exp() * table).sum(1).mean().item(), worth, best.item()


@pytest.mark.parametrize(("method", "price"), [("grpo", 0.0), ("gspo", 0.0), ("rloo", 0.0), ("rloo", PRICE)])
def test_the_best_answer_is_found(method, price):
    """At least 90 % of the way from the worth of the start to the largest; RLOO's price is that of the reward, so that its best
    policy is known: p_ref exp(r / b)."""
    start, worth, best = bandit(method, price=price, seed=0)
    assert worth <= best + 1e-6
    assert (worth - start) / (best - start) > 0.9


@pytest.mark.slow
def test_sums_are_learned_by_trying(tmp_path):
    """`examples/arithmetic_rl.py` with sums up to 19 and 40 steps of GRPO, from a fine-tuned model: the share of right answers
    goes from 0.38 in the first ten steps to 0.72 in the last ten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(arithmetic_rl.LEARNING, "logging_steps", 10)
        task = arithmetic_rl.make_task(largest_sum=19, held_out=20, seed=0)
        methods = {"grpo": arithmetic_rl.METHODS["grpo"]}  # bandits above have the others
        (result,) = arithmetic_rl.run(methods, task=task, seed=0, steps=40, folder=str(tmp_path))
    rewards = [reward for _, reward, _ in result.curve]
    assert [step for step, _, _ in result.curve] == [10, 20, 30, 40]
    assert 0.3 < rewards[0] < 0.45
    assert rewards[-1] > 0.65
