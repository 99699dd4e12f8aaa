"""Online DPO, Nash-MD and XPO learn: bandits of one token whose optimum or equilibrium is known, and sums."""

import copy
import math
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from examples import arithmetic_rl, online_preferences
from examples.sums import share_right
from torch import Tensor
from transformers import TrainerCallback

from tests.experimental.test_ppo_learning import ACTIONS, FLAT, PROMPTS, distributions
from tests.tiny import tiny_model
from tests.trainer.grpo_runs import make
from trl.experimental.judges import BasePairwiseJudge

SETTINGS = {
    "dtype": "float32", "reward_funcs": None, "num_generations": 2, "max_completion_length": 1, "temperature": 1.0,
    "optim": "adamw_torch", "lr_scheduler_type": "linear", "logging_steps": 1000, "max_grad_norm": 1.0,
}  # fmt: skip
SPECIAL, RARE = 3, 9  # the first tokens, which have no text; the arm that is hardly ever drawn
CLASS = torch.tensor([min(token // 5, 2) for token in range(ACTIONS)])  # rock, paper, scissors


def arm(text: str) -> int:
    """The arm of a completion's text: the number of its token, 0 for all special ones."""
    word = text.strip()[1:]
    return int(word) if word.isdigit() else 0


class BradleyTerry(BasePairwiseJudge):
    """Prefers the first with probability sigmoid(r - r'), and counts the arms that it saw.

    Not by chance: of the answers to one question that share is for the first, up to one answer.
    """

    def __init__(self, table: list[float]) -> None:
        self.table, self.seen = table, Counter()
        self.owed: dict[tuple[str, int, int], float] = {}

    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
        return [self.answer(prompt, *map(arm, pair)) for prompt, pair in zip(prompts, completions, strict=True)]

    def answer(self, prompt: str, first: int, second: int) -> int:
        self.seen.update([first, second])
        low, high = sorted([first, second])
        wins = 1 / (1 + math.exp(self.table[high] - self.table[low]))
        owed = self.owed.get((prompt, low, high), 0.5) + wins
        self.owed[prompt, low, high] = owed - (owed >= 1)
        return int((first == low) != (owed >= 1))


class RockPaperScissors(BasePairwiseJudge):
    """Paper beats rock, scissors beat paper, rock beats scissors."""

    def judge(
        self,
        prompts: list[str],
        completions: list[list[str]],
        shuffle_order: bool = True,
        return_scores: bool = False,
    ) -> list[Any]:
        gaps = [int(CLASS[arm(first)] - CLASS[arm(second)]) % 3 for first, second in completions]
        return [((0.5, 1.0, 0.0) if return_scores else (-1, 0, 1))[gap] for gap in gaps]


class Watch(TrainerCallback):
    """The policy's distributions after each step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(distributions(model).exp())


def train(
    method: str,
    judge: BasePairwiseJudge,
    policy: Any,
    *,
    reference: Any = None,
    prompts: int = 2,
    **settings: Any,
) -> Tensor:
    """The policy's distributions after each step, `(S, 2, 16)`."""
    watch = Watch()
    trainer, _ = make(
        method, **{**SETTINGS, **settings}, data=Dataset.from_dict({"input_ids": list(PROMPTS[:prompts]) * 4}),
        given={"model": policy, "judge": judge, "ref_model": reference or copy.deepcopy(policy), "callbacks": [watch]},
    )  # fmt: skip
    trainer.train()
    return torch.stack(watch.steps)


def linear_policy(seed: int) -> Any:
    """A model of which only the head is trained."""
    policy = tiny_model("gpt2", seed=seed, tie_word_embeddings=False, **FLAT).requires_grad_(False)
    policy.lm_head.requires_grad_(True)
    return policy


def test_online_dpo_reaches_the_closed_form() -> None:
    """With preferences by Bradley and Terry the best policy is `p_ref exp(r / beta)`, up to a factor: the total variation falls from
    above 0.3 to 0.01 for both prompts."""
    policy = linear_policy(seed=0)
    table = torch.randn(ACTIONS, generator=torch.Generator().manual_seed(0)).double()
    table[:SPECIAL] = table[0]  # one arm to the judge
    start = distributions(policy)
    best = (start + table).softmax(-1)
    steps = train(
        "online_dpo", BradleyTerry(table.tolist()), policy, beta=1.0, per_device_train_batch_size=96, max_steps=100,
        learning_rate=4e-3, seed=0,
    )  # fmt: skip
    before, after = ((found - best).abs().sum(-1) / 2 for found in (start.exp(), steps[-1]))
    assert before.min() > 0.3
    assert after.max() < 0.02


def rock(policy: Any) -> Any:
    """A copy that answers "rock" to 70 % or more."""
    policy = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    while True:
        logits = torch.stack([policy(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
        share = logits.softmax(-1)[:, CLASS == 0].sum(1)
        if share.min() > 0.7:
            return policy
        optimizer.zero_grad()
        (-share.log().sum()).backward()
        optimizer.step()


def test_nash_md_mixes_rock_paper_and_scissors_where_online_dpo_cycles() -> None:
    """From a policy that answers "rock" to a reference that is nearly uniform, over the last half of 50 steps: the class that is farthest
    from a third, and the largest share that each class has at some time."""
    farthest, largest = {}, {}
    for method, settings in {"nash_md": {"mixture_coef": 0.5}, "online_dpo": {}}.items():
        reference = tiny_model("gpt2", seed=0, **FLAT)
        steps = train(
            method, RockPaperScissors(), rock(reference), reference=reference, beta=0.2, max_steps=50, learning_rate=5e-3,
            lr_scheduler_type="constant", per_device_train_batch_size=48, seed=0, **settings,
        )  # fmt: skip
        shares = torch.stack([steps[25:, 0, each == CLASS].sum(-1) for each in range(3)], dim=1)
        farthest[method] = (shares - 1 / 3).abs().amax(dim=1).mean().item()
        largest[method] = shares.amax(dim=0)
    assert farthest["nash_md"] < 0.13 and farthest["online_dpo"] > 0.25
    assert largest["nash_md"].max() < 0.55 and largest["online_dpo"].min() > 0.55


@pytest.mark.parametrize("seed", range(2))
def test_xpo_finds_an_arm_that_online_dpo_never_draws(seed: int) -> None:
    """The best arm has a probability of 5e-6; both methods draw 2,560 completions, XPO half of them from the reference."""
    shares, seen = {}, {}
    for method, settings in {"xpo": {"alpha": 0.05}, "online_dpo": {}}.items():
        policy = linear_policy(seed)
        with torch.no_grad():
            hidden = policy.transformer(torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1]
            policy.lm_head.weight[RARE] = -9.5 * hidden / hidden.square().sum()
        table = torch.randn(ACTIONS, generator=torch.Generator().manual_seed(seed))
        table[RARE] = 6.0
        judge = BradleyTerry(table.tolist())
        steps = train(
            method, judge, policy, beta=0.5, max_steps=80, learning_rate=1e-2, lr_scheduler_type="constant",
            per_device_train_batch_size=16, prompts=1, seed=seed, **settings,
        )  # fmt: skip
        shares[method], seen[method] = steps[:, 0, RARE], judge.seen[RARE]
    assert shares["xpo"][-1] > 0.9 and seen["xpo"] > 50
    assert shares["online_dpo"].max() < 1e-4 and seen["online_dpo"] == 0


# Steps of `examples/online_preferences.py`, after which 0.88, 0.72 and 0.82 of the sums are right, and how many more that is at least.
STEPS = {"online_dpo": (30, 0.1), "nash_md": (50, 0.05), "xpo": (30, 0.1)}


@pytest.fixture(scope="session")
def fine_tuned() -> tuple[arithmetic_rl.Student, float]:
    """A model that is right in 0.62 of the sums up to 19."""
    task = arithmetic_rl.make_task(largest_sum=19, held_out=20, seed=0)
    task = replace(task, held_out=task.problems[:100])  # too few to generalise from
    student = arithmetic_rl.Student.fresh(task, seed=0)
    arithmetic_rl.fine_tune(student, seed=0, folder=tempfile.mkdtemp(), enough=online_preferences.ENOUGH)
    return student, share_right(student.model, student.tokenizer, task.held_out)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_sums_are_learned_from_comparisons(
    name: str, fine_tuned: tuple[arithmetic_rl.Student, float], tmp_path: Path
) -> None:
    (student, before), method, (steps, gain) = fine_tuned, online_preferences.METHODS[name], STEPS[name]
    assert STEPS.keys() == online_preferences.METHODS.keys() and before < 0.7
    result = arithmetic_rl.Result(name, 0, before, 0, steps)
    student = replace(student, model=copy.deepcopy(student.model))
    method = method._replace(settings={**method.settings, "logging_steps": steps})
    arithmetic_rl.learn(method, student, result, folder=str(tmp_path))
    assert result.reached > before + gain
