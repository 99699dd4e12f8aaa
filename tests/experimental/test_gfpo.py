"""GFPO: which completions remain, what is learned from them, and what is refused."""

import pytest
import torch

from tests.experimental.group_runs import make, run
from tests.trainer import grpo_runs
from tests.trainer.grpo_runs import logs, prompts
from tests.trainer.one_step import assert_same_steps
from trl.rollouts.experience import ADVANTAGE, FILTERED, SAMPLING_LOGPS, SCORES


def test_advantages_are_over_what_remains():
    """Rewards 1, 3, 5, 7 of which the second and the fourth remain: mean 5, deviation sqrt(8)."""
    trainer, _ = make("gfpo")
    rows = {SCORES: torch.tensor([1.0, 3.0, 5.0, 7.0]).double(), FILTERED: torch.tensor([1.0, 0.0, 1.0, 0.0])}
    worth, advantages = trainer.method.rewards_and_advantages(rows, 4)
    step = 2 / (8**0.5 + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([0, -step, 0, step], dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(worth, rows[SCORES])


def test_the_function_is_asked_with_whole_groups_and_their_columns():
    seen = {}

    def look(group_completions, group_rewards, **columns):
        seen.update(columns, group_completions=group_completions, group_rewards=group_rewards)
        return [[float(row == 2 or row == 0) for row in range(4)] for _ in group_rewards]

    data = prompts().add_column("level", list(range(14)))
    trainer, _ = make("gfpo", data=data, shuffle_dataset=False, given={"group_filter_func": look})
    experience = trainer.make_rollout_batch(0)
    assert seen["level"] == [[0] * 4, [1] * 4] and seen["trainer_state"] is trainer.state
    ids = [row.tolist() for row in experience.completions.split()]
    assert seen["completion_ids"] == [ids[:4], ids[4:]]
    assert torch.tensor(seen["group_rewards"]).flatten().tolist() == experience.per_row[SCORES].float().tolist()
    assert experience.per_row[FILTERED].tolist() == [False, True, False, True] * 2
    assert not experience.per_row[ADVANTAGE][experience.per_row[FILTERED]].any()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_it_is_grpo_on_the_completions_that_remain(loss_type):
    """The gradient is that of a GRPO run whose prompts were completed twice, with what remained."""
    settings = {"loss_type": loss_type, "beta": 0.0, "max_steps": 1, "per_device_train_batch_size": 16}
    trainer, found = make("gfpo", **settings)
    experience = trainer.make_rollout_batch(0)
    kept = experience.take((~experience.per_row[FILTERED]).nonzero()[:, 0])
    trainer.train()

    def again(_, trainer):
        logps = kept.per_token[SAMPLING_LOGPS].split(kept.completions.lengths.tolist())
        return {
            "prompt_ids": [row.tolist() for row in kept.prompts.split()],
            "completion_ids": [row.tolist() for row in kept.completions.split()],
            "logprobs": [row.tolist() for row in logps],
        }

    half = {**settings, "per_device_train_batch_size": 8, "num_generations": 2}
    half |= {"vllm_importance_sampling_correction": False, "given": {"rollout_func": again}}
    _, expected = grpo_runs.run(**half)
    assert_same_steps(found.steps, expected.steps)


def test_what_is_filtered_out_is_counted_and_measured():
    trainer, _ = run("gfpo", max_steps=3)
    entries = logs(trainer)
    last = entries[-1]
    sampled = sum(entry["completions/mean_length"] * 8 for entry in entries)
    counted = {name: value for name, value in last.items() if name.startswith("tokens/")}
    assert sum(counted.values()) == pytest.approx(sampled) and counted["tokens/filtered"] > 0
    remaining = sum(entry["remaining/mean_length"] * 4 for entry in entries)
    assert sampled - counted["tokens/filtered"] == pytest.approx(remaining)
    assert last["remaining/mean_length"] < last["completions/mean_length"]


SHAPES = {
    "split": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
    "split within what remains": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "no shared prompts": {"prefix_sharing": False},
}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_splits_and_layouts(loss_type):
    settings = {
        "loss_type": loss_type,
        "per_device_train_batch_size": 16,
        "num_iterations": 2,
        "max_steps": 3,
    }
    _, expected = run("gfpo", **settings)
    for change in SHAPES.values():
        _, found = run("gfpo", **{**settings, **change})
        assert_same_steps(found.steps, expected.steps)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ([1.0] * 8, TypeError, "expected a list of 4 finite scores for each of 2 groups"),
        ([[1.0] * 4], ValueError, "returned 1 groups"),
        ([[1.0] * 4, [1.0] * 3], ValueError, "2 groups of other sizes"),
        ([[1.0] * 4, [1.0, float("inf"), 0.0, 0.0]], ValueError, "returned inf"),
    ],
)
def test_answers_that_are_no_scores_are_named(answer, error, words):
    trainer, _ = make("gfpo", given={"group_filter_func": lambda group_completions: answer})
    with pytest.raises(error, match=words):
        trainer.make_rollout_batch(0)
