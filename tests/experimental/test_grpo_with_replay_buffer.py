"""GRPO with a replay buffer: which groups are kept, which are replaced, and that nothing of it is lost in a checkpoint."""

import json

import pytest
import torch

from tests.experimental.group_runs import make, run
from tests.trainer.grpo_runs import logs
from tests.trainer.one_step import assert_same_steps
from tests.two_processes import launch
from trl.rollouts.experience import ADVANTAGE, MEAN_LENGTH, OLD, REPLAYED, SCORES, Experience
from trl.rollouts.replay import GroupBuffer
from trl.tensors.ragged import Ragged


def groups(*tokens):
    """Groups of two completions of one token each."""
    return Experience(Ragged.of([[1]] * len(tokens)), Ragged.of([[token] for token in tokens]))


def test_the_buffer_keeps_the_best_and_of_equal_ones_the_newest(tmp_path):
    buffer = GroupBuffer(size=2, group_size=2)
    buffer.add(groups(10, 11, 20, 21), torch.tensor([0.5, 0.9]))
    buffer.add(groups(30, 31), torch.tensor([0.5]))
    buffer.add(groups(40, 41), torch.tensor([0.1]))
    assert buffer.rows([0, 1]).completions.values.tolist() == [30, 31, 20, 21]
    buffer.save(tmp_path)
    again = GroupBuffer(size=2, group_size=2)
    again.load(tmp_path)
    assert again.rows([1, 0]).completions.values.tolist() == [20, 21, 30, 31]
    again.add(groups(50, 51), torch.tensor([0.7]))
    assert again.rows([0, 1]).completions.values.tolist() == [50, 51, 20, 21]
    again.load(tmp_path / "elsewhere")
    assert len(again) == 0


def only_at_first(completion_ids, trainer_state, **_):
    """Rewards that differ in the first batch of completions alone."""
    return [float(row % 4) if trainer_state.global_step == 0 else 1.0 for row in range(len(completion_ids))]


def test_groups_that_teach_nothing_give_way_to_earlier_ones():
    trainer, _ = make("replay", reward_funcs=only_at_first)
    first = trainer.make_rollout_batch(0)
    assert not first.per_row[REPLAYED].any() and len(trainer.buffer) == 2
    trainer.state.global_step = 1
    trainer._sums["train"].drain()
    second = trainer.make_rollout_batch(1)
    assert second.per_row[REPLAYED].all() and len(trainer.buffer) == 2
    pairs = [(second.take(torch.arange(n, n + 4)), first.take(torch.arange(m, m + 4))) for n, m in ((0, 0), (4, 4))]
    if not torch.equal(pairs[0][0].completions.values, pairs[0][1].completions.values):
        pairs = [(pairs[0][0], pairs[1][1]), (pairs[1][0], pairs[0][1])]
    for own, earlier in pairs:
        assert torch.equal(own.completions.values, earlier.completions.values)
        for name in (ADVANTAGE, SCORES):
            assert torch.equal(own.per_row[name], earlier.per_row[name])
        assert torch.equal(own.per_token[OLD], earlier.per_token[OLD])
    assert float(second.per_row[MEAN_LENGTH][0]) == pytest.approx(float(first.completions.lengths.double().mean()))
    assert trainer._sums["train"].drain()["frac_reward_zero_std"] == 1.0  # of what was generated
    assert torch.equal(first.per_row[ADVANTAGE].view(2, 4)[0], first.per_row[ADVANTAGE].view(2, 4)[1])


def test_a_run_does_not_draw_from_an_earlier_one():
    trainer, _ = make("replay", reward_funcs=only_at_first, max_steps=1)
    for _ in range(2):
        trainer.train()
        assert len(trainer.buffer) == 2


def test_tokens_that_are_learned_from_again_are_counted_once():
    trainer, _ = run("replay", reward="first_is_rare", max_steps=8)
    entries = logs(trainer)
    assert any(entry["replay/replaced_groups"] for entry in entries)
    sampled = sum(entry["completions/mean_length"] * 8 for entry in entries)
    counted = sum(value for name, value in entries[-1].items() if name.startswith("tokens/"))
    assert counted == pytest.approx(sampled)


@pytest.mark.parametrize("cut", [{}, {"top_k": 30}], ids=["exact sampler", "cut distribution"])
def test_a_killed_run_goes_on_with_the_same_buffer_to_the_same_bits(cut, tmp_path):
    settings = {
        "num_iterations": 2, "max_steps": 12, "save_strategy": "steps", "save_steps": 5, "learning_rate": 0.01,
        "dtype": "float32", "reward": "first_is_rare", "replay_buffer_size": 3, **cut,
    }  # fmt: skip
    whole, _ = run("replay", folder=str(tmp_path / "whole"), **settings)
    replaced = [entry.get("replay/replaced_groups", 0) for entry in logs(whole)]
    assert any(replaced[:5]) and any(replaced[6:]), replaced
    for step in (5, 10):  # within a window, between windows
        again, _ = make("replay", folder=str(tmp_path / f"again{step}"), **settings)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[name]), (step, name)
        assert logs(again)[-1] == logs(whole)[-1]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_of_both_variants(tmp_path):
    settings = {
        "per_device_train_batch_size": 8, "num_iterations": 2, "max_steps": 8, "reward": "first_is_rare",
        "learning_rate": 0.005,
    }  # fmt: skip
    launch(
        "tests.experimental.group_runs",
        str(tmp_path / "two.pt"),
        json.dumps({**settings, "per_device_train_batch_size": 4}),
    )
    two = torch.load(tmp_path / "two.pt")
    for method, (gradients, entries) in two.items():
        trainer, expected = run(method, **settings)
        assert_same_steps(gradients, expected.steps)
        for own, known in zip(entries, logs(trainer), strict=True):
            assert own.keys() == known.keys()
            for name, value in known.items():
                if name.startswith(("replay/", "remaining/", "tokens/", "reward", "frac_")):
                    assert own[name] == pytest.approx(value, abs=1e-9), (method, name)
    assert any(entry.get("replay/replaced_groups") for entry in two["replay"][1])
