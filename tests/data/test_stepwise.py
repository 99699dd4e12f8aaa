"""Stepwise rows: where the classes stand, what is cut off, and what is refused."""

from typing import Any

import pytest
from datasets import Dataset
from tests.tiny_tokenizers import tiny_tokenizer

from trl.data.pipeline import prepare_dataset
from trl.data.stepwise import StepwisePreparation

ROWS: list[dict[str, Any]] = [
    {"prompt": "How many apples are left?", "completions": ["Seven apples.", "And 12 pears."], "labels": [True, False]},
    {"prompt": "And then?", "completions": ["Look up.", "It is blue.", "Next."], "labels": [True, True, True]},
    {"prompt": "And then?", "completions": ["Be brief."], "labels": [False]},
]  # fmt: skip


def prepare(rows: list[dict], *, streaming: bool = False, **settings: Any) -> Any:
    dataset: Any = Dataset.from_list(rows)
    if streaming:
        dataset = dataset.to_iterable_dataset()
    return prepare_dataset(dataset, tiny_tokenizer(), StepwisePreparation(**settings))


def ids(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


def test_the_class_of_a_step_stands_on_the_last_token_of_its_separator() -> None:
    rows, report = prepare(ROWS, step_separator="\n\n")
    steps = [ids(step) + ids("\n\n") for step in ROWS[0]["completions"]]
    prompt = ids("<s>") + ids(ROWS[0]["prompt"])
    assert rows[0]["input_ids"] == prompt + steps[0] + steps[1]
    quiet = [[-100] * (len(step) - 1) for step in steps]
    assert rows[0]["labels"] == [-100] * len(prompt) + quiet[0] + [1] + quiet[1] + [0]
    assert (report.rows, report.steps, report.removed_steps) == (3, 6, 0)
    assert report.summary() == f"train dataset: 3 rows, {report.tokens} tokens, 6 steps"


def test_only_the_last_step_is_labelled_in_training_and_all_in_evaluation() -> None:
    every, _ = prepare(ROWS)
    last, report = prepare(ROWS, train_on_last_step_only=True)
    evaluated, _ = prepare(ROWS, train_on_last_step_only=True, is_eval=True)
    assert evaluated[:] == every[:]
    assert last["input_ids"][:] == every["input_ids"][:]
    kept = [[label for label in row if label != -100] for row in last["labels"]]
    assert kept == [[0], [1], [0]]
    assert [row[-1] for row in last["labels"]] == [0, 1, 0]
    assert report.steps == 3


def test_prompts_keep_their_end_and_steps_their_beginning() -> None:
    whole, _ = prepare(ROWS)
    row, begin = whole[0], ids("<s>")
    prompt = ids(ROWS[0]["prompt"])
    rows, _ = prepare(ROWS, max_prompt_length=3)
    assert rows[0]["input_ids"] == begin + prompt[-3:] + row["input_ids"][1 + len(prompt) :]
    rows, report = prepare(ROWS, max_completion_length=4)
    assert rows[0]["input_ids"] == row["input_ids"][: 1 + len(prompt) + 4]
    assert all(len(line["labels"]) == len(line["input_ids"]) for line in rows)
    rows, _ = prepare(ROWS, max_length=12)
    assert rows[0]["input_ids"] == row["input_ids"][:12]
    assert rows[0]["labels"] == row["labels"][:12]
    assert report.removed_tokens == sum(map(len, whole["input_ids"])) - report.tokens


def test_what_truncation_takes_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    rows, report = prepare(ROWS, max_length=10)
    left = [sum(label != -100 for label in row) for row in rows["labels"]]
    assert (report.rows, report.steps) == (3, 6)
    assert report.removed_steps == 6 - sum(left)
    assert report.untrained_rows == left.count(0) > 0
    assert f"{report.removed_steps} labelled steps were cut off" in caplog.text
    assert f"in {left.count(0)} of 3 rows" in caplog.text
    dropped, report = prepare(ROWS, max_length=10, untrained_rows="drop")
    assert (len(dropped), report.dropped_rows) == (3 - left.count(0), left.count(0))
    with pytest.raises(ValueError, match=r"train dataset, row 0, column 'input_ids': none .* Raise max_length"):
        prepare(ROWS, max_length=10, untrained_rows="error")


def test_tokens_pass_and_are_cut() -> None:
    given = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 1, -100, 0], "other": "x"}]
    rows, report = prepare(given, max_length=3)
    assert rows[:] == {"input_ids": [[5, 6, 7]], "labels": [[-100, 1, -100]]}
    assert (report.steps, report.removed_steps, report.removed_tokens) == (2, 1, 1)
