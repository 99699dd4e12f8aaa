"""Groups without a difference in reward are sampled again with other prompts, the same for any number of processes."""

import json

import pandas as pd
import pytest
import torch

from tests.experimental import group_runs
from tests.trainer.grpo_runs import first_is_rare, logs, make, run
from tests.two_processes import launch
from trl.reporting.run_events import parts_in
from trl.rollouts.experience import SCORES
from trl.rollouts.schedule import refill_rows, rollout_rows

ON = {"dynamic_sampling": True, "reward_funcs": first_is_rare}


def groups_of(experience, size=4):
    """Prompt and rewards of each group."""
    rows = [row.tolist() for row in experience.prompts.split()]
    scores = experience.per_row[SCORES].tolist()
    return [(rows[first : first + size], scores[first : first + size]) for first in range(0, len(rows), size)]


def test_refills_are_other_prompts_until_there_are_no_others():
    taken = rollout_rows(3, 4, dataset=10, seed=1)
    drawn = [refill_rows(3, first, 3, taken=taken, dataset=10, seed=1) for first in (0, 3)]
    assert sorted([*taken, *drawn[0], *drawn[1]]) == list(range(10))
    assert sorted(refill_rows(3, 6, 10, taken=taken, dataset=10, seed=1)) == list(range(10))
    assert refill_rows(3, 0, 6, taken=taken, dataset=10, seed=1) == drawn[0] + drawn[1]
    assert refill_rows(4, 0, 6, taken=taken, dataset=10, seed=1) != drawn[0] + drawn[1]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_window_has_groups_that_teach(method):
    settings = {"per_device_train_batch_size": 32}
    plain = groups_of(make(method, reward_funcs=first_is_rare, **settings)[0].make_rollout_batch(1))
    trainer, _ = make(method, **ON, **settings)
    found = groups_of(trainer.make_rollout_batch(1))
    assert [len(set(scores)) > 1 for _, scores in plain].count(False) > 0
    kept = [old for old in plain if len(set(old[1])) > 1]
    assert [new for new, old in zip(found, plain, strict=True) if old in kept] == kept  # as they were, in their places
    for rows, scores in found:
        assert len(set(scores)) > 1 and all(row == rows[0] for row in rows)
    measured = trainer._sums["train"].drain()
    sampled = measured["dynamic_sampling/sampled_groups"]
    assert measured["dynamic_sampling/rounds"] >= 1 and measured["dynamic_sampling/kept_zero_groups"] == 0
    assert sampled <= 6  # of fourteen prompts eight stand in the window already: nothing is drawn twice
    ids = trainer.train_dataset["input_ids"]
    assert all([rows[0] for rows, _ in found].count(own) <= ids.count(own) for own in ids)


def test_at_the_limit_groups_stay_as_they_are():
    def constant(completions, **_):
        return [1.0] * len(completions)

    plain, _ = make(reward_funcs=constant)
    trainer, keep = run(reward_funcs=constant, dynamic_sampling=True, max_resampling_rounds=3, max_steps=2, beta=0.0)
    for entry in logs(trainer):
        assert entry["dynamic_sampling/rounds"] == 3 and entry["dynamic_sampling/kept_zero_groups"] == 2
        assert entry["dynamic_sampling/sampled_groups"] == 6 and entry["loss"] == 0
    assert groups_of(trainer.make_rollout_batch(0)) == groups_of(plain.make_rollout_batch(0))
    assert not any(value.any() for step in keep.steps for value in step.values())


def test_rows_without_a_reward_are_sampled_again_too():
    def rarely(completion_ids, **_):
        return [float(len(ids)) if ids[0] % 2 else None for ids in completion_ids]

    found = groups_of(make(reward_funcs=rarely, dynamic_sampling=True)[0].make_rollout_batch(0))
    for _, scores in found:
        assert len({score for score in scores if score == score}) > 1


def test_groups_are_sampled_again_where_what_remains_of_them_is_equal():
    trainer, _ = group_runs.make("gfpo", **ON)
    window = trainer.make_rollout_batch(0)
    scores = window.per_row[SCORES].view(-1, 4)[~window.per_row["filtered"].view(-1, 4)].view(-1, 2)
    assert (scores[:, 0] != scores[:, 1]).all()


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Three groups of four, of which the middle one stands on both; two passes over each window, with masked tokens."""
    settings = {
        "num_iterations": 2, "max_steps": 4, "learning_rate": 0.01, "dynamic_sampling": True, "reward": "first_is_rare",
        "max_resampling_rounds": 4, "max_completion_length": 5, "top_entropy_quantile": 0.4, "data_seed": 0,
        "log_completions": True,
    }  # fmt: skip
    trainer, expected = run(per_device_train_batch_size=12, folder=str(tmp_path / "one"), **settings)
    cut = {**settings, "per_device_train_batch_size": 6, "folder": str(tmp_path / "two")}
    launch("tests.trainer.grpo_runs", str(tmp_path / "two.pt"), json.dumps(cut))
    found = torch.load(tmp_path / "two.pt")
    assert len(found["gradients"]) == len(expected.steps) == 4
    for own, known in zip(found["gradients"], expected.steps, strict=True):
        size = max(float(value.abs().max()) for value in known.values())
        for name, value in known.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-10 * size, msg=name)
    for own, known in zip(found["logs"], logs(trainer), strict=True):
        assert own.keys() == known.keys()
        for name, value in known.items():
            if name.startswith(("tokens/", "dynamic_sampling/", "reward", "num_tokens")):
                assert own[name] == pytest.approx(value, abs=1e-9), name
    parts = {name: parts_in(tmp_path / name) for name in ("one", "two")}
    assert list(parts["one"]) == list(parts["two"]) == [1, 3]  # the steps that a window begins with
    for whole, own in zip(*(map(pd.read_parquet, paths.values()) for paths in parts.values()), strict=True):
        assert whole["group"].tolist() == own["group"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
        for name in ("prompt", "completion", "first_is_rare"):
            assert whole[name].tolist() == own[name].tolist(), name
    sampled = [entry["dynamic_sampling/sampled_groups"] for entry in logs(trainer)[::2]]
    assert any(number % 2 for number in sampled)  # one process samples a group that the other has too
    assert logs(trainer)[-1]["tokens/zero_advantage"] > 0 < logs(trainer)[-1]["tokens/masked"]
