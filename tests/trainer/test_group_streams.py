"""GRPO and RLOO on streams of prompts: the same steps as on stored rows, to the same bits after a stop, evaluation, errors."""

from itertools import chain

import pytest
import torch
from datasets import Dataset, IterableDataset

from tests.trainer.grpo_runs import logs, make, prompts, run
from tests.trainer.one_step import assert_same_steps
from trl.data import prompts as prompt_rows

SETTINGS = {"max_steps": 5, "steps_per_generation": 2, "num_iterations": 1, "max_completion_length": 5}


def stream(shards: int = 1) -> IterableDataset:
    """Fourteen prompts with a column for the reward function."""
    rows = prompts()
    return rows.add_column("wanted", list(range(len(rows)))).to_iterable_dataset(num_shards=shards)


def stored() -> Dataset:
    return Dataset.from_list(list(stream()))


def near(completion_ids, wanted, **_):
    return [-abs(ids[0] - 4 * number) / 60 for ids, number in zip(completion_ids, wanted, strict=True)]


def seen_rows(trainer, windows: int) -> list[list[int]]:
    prompts = trainer.rollouts.prompts
    return [prompts.rows[prompts.of_batch(number)]["wanted"] for number in range(windows)]


def test_a_stream_in_order_is_learned_from_as_stored_rows_are():
    """By RLOO, while the tests below have GRPO. More than two passes over 14 rows, 4 in each window; the run ends within a window, and its epoch with it."""
    settings = {**SETTINGS, "max_steps": 17, "shuffle_dataset": False, "reward_funcs": near}
    whole, expected = run("rloo", data=stored(), **settings)
    found, gradients = run("rloo", data=stream(), **settings)
    assert_same_steps(gradients.steps, expected.steps)
    assert [entry["reward"] for entry in logs(found)[::2]] == [entry["reward"] for entry in logs(whole)[::2]]
    assert logs(found)[-1]["epoch"] == 1.0 and whole.state.epoch >= 2


def test_a_shuffled_stream_has_every_row_in_every_pass_in_another_order(monkeypatch):
    monkeypatch.setattr(prompt_rows, "SHUFFLED_ROWS", 5)
    orders = []
    for seed in (0, 0, 1):
        trainer, _ = make(data=stream(shards=3), seed=seed, reward_funcs=near, **SETTINGS)
        rows = list(chain.from_iterable(seen_rows(trainer, 7)))  # two passes of 14 rows
        assert sorted(rows[:14]) == sorted(rows[14:]) == list(range(14))
        assert rows[:14] != rows[14:] and rows[:14] != list(range(14))
        assert seen_rows(trainer, 2) == [rows[:4], rows[4:8]]  # from the beginning again
        orders.append(rows)
    assert orders[0] == orders[1] != orders[2]


def test_a_run_that_stops_goes_on_to_the_same_bits(tmp_path):
    """After a window of the first pass over the stream, and within one of the second."""
    settings = {
        **SETTINGS, "max_steps": 12, "save_strategy": "steps", "save_steps": 3, "dtype": "float32", "learning_rate": 0.01,
        "reward_funcs": near,
    }  # fmt: skip
    whole, _ = run(folder=str(tmp_path / "whole"), data=stream(), **settings)
    for step in (6, 9):
        again, _ = make(folder=str(tmp_path / f"again{step}"), data=stream(), **settings)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[name]), (step, name)
        assert logs(again)[-1] == logs(whole)[-1]


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        (stream(), {"max_steps": -1}, "a stream.* got max_steps=-1"),
        (stream(), {"dynamic_sampling": True}, "a stream.* got dynamic_sampling=True"),
        (IterableDataset.from_generator(lambda: iter([{"input_ids": []}])), {}, "row 0, column 'input_ids': a prompt without"),
        (IterableDataset.from_generator(lambda: iter([{"text": "a"}])), {}, r"columns \['text'\], expected 'prompt'"),
        (stream(), {"reward_funcs": lambda missing, **_: [0.0]}, "missing"),
    ],
)  # fmt: skip
def test_what_a_stream_cannot_be_trained_with(data, settings, words):
    with pytest.raises(ValueError, match=words):
        make(data=data, **{"max_steps": 2, **settings})
