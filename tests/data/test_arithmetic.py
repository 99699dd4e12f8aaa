"""Data sets made from a seed: rows are right, splits are apart, and every method that the table names trains on them."""

import re

import pytest
from examples import small_model
from examples.gsm8k_rewards import in_form, is_right
from transformers import LlamaForSequenceClassification, LlamaForTokenClassification

import trl
from trl import make_data
from trl.data.arithmetic import ROWS, make_rows

EQUATION = re.compile(r"(\d+)([-+*])(\d+) = (\d+)")


def test_solutions_are_right_and_in_the_form_of_gsm8k():
    rows = make_rows("problems")["train"]
    solutions = [row["answer"] for row in rows]
    assert in_form(solutions) == [1.0] * 400
    assert is_right(solutions, solutions) == [1.0] * 400
    for row in rows:
        numbers = [int(number) for number in re.findall(r"\d+", row["question"])]
        first, sign, second = re.search(r"<<(\d+)([-+*])(\d+)=", row["answer"]).groups()
        assert [int(first), int(second)] == numbers
        assert row["answer"].endswith(f"#### {eval(f'{first}{sign}{second}')}")


def test_the_preferred_answer_is_right_and_the_other_is_wrong():
    for row in make_rows("preferences")["train"]:
        question, chosen = row["chosen"]
        assert question == row["rejected"][0]
        first, sign, second, result = EQUATION.search(chosen["content"]).groups()
        assert eval(f"{first}{sign}{second}") == int(result)
        wrong = re.findall(r"\d+", row["rejected"][1]["content"])[-1]
        assert wrong != result


def test_half_of_the_ratings_and_steps_are_right():
    assert sum(row["label"] for row in make_rows("ratings")["train"]) == 200
    assert sum(all(row["labels"]) for row in make_rows("steps")["train"]) == 200
    assert all(row["labels"][0] for row in make_rows("steps")["train"])


@pytest.mark.parametrize("name", ROWS)
def test_a_seed_gives_its_rows_and_no_question_is_in_both_splits(name):
    splits = make_rows(name, rows=80, seed=3)
    assert [len(rows) for rows in splits.values()] == [80, 10]
    assert make_rows(name, rows=80, seed=3) == splits
    if name != "images":
        assert make_rows(name, rows=80, seed=4) != splits
        assert not {str(row) for row in splits["train"]} & {str(row) for row in splits["test"]}
    assert make_data(name, rows=80)["test"].column_names == list(splits["test"][0])


def test_wrong_names_and_sizes_are_errors():
    with pytest.raises(ValueError, match=r"name must be one of problems, chats, .* got 'sums'"):
        make_data("sums")
    with pytest.raises(ValueError, match="rows must be from 8 to 10000, got 7"):
        make_data("chats", rows=7)


# Rows, method, its settings.
METHODS = [
    ("chats", "SFT", {"assistant_only_loss": True}),
    ("tools", "SFT", {"assistant_only_loss": True}),
    ("preferences", "Reward", {}),
    ("preferences", "DPO", {}),
    ("preferences", "CPO", {}),
    ("preferences", "ORPO", {}),
    ("ratings", "KTO", {}),
    ("ratings", "BCO", {}),
    ("steps", "PRM", {}),
    ("prompts", "GRPO", {"max_completion_length": 4, "num_generations": 4}),
]


def has_the_solution(completions, solution, **columns):
    return [float(right in answer[0]["content"]) for answer, right in zip(completions, solution, strict=True)]


@pytest.fixture(scope="module")
def tokenizer():
    return small_model.train_tokenizer(small_model.built_in(), vocabulary=600)


def test_a_small_model_reads_the_strings_inside_of_messages():
    row = {
        "id": 3,
        "messages": [{"role": "user", "content": "When?"}, {"role": "assistant", "content": None}],
        "note": "x",
    }
    assert list(small_model.strings(row)) == ["user", "When?", "assistant", "x"]


@pytest.mark.parametrize(("name", "method", "settings"), METHODS)
def test_methods_train_on_their_rows_without_a_warning(name, method, settings, tokenizer, tmp_path, caplog):
    model = small_model.small_llama(tokenizer, seed=0, layers=1, width=64)
    if method in ("Reward", "PRM"):
        model.config.num_labels = {"Reward": 1, "PRM": 2}[method]
        head = LlamaForSequenceClassification if method == "Reward" else LlamaForTokenClassification
        model = head(model.config)
    args = getattr(trl, f"{method}Config")(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=4,
        max_steps=1,
        **settings,
    )
    functions = {"reward_funcs": has_the_solution} if method == "GRPO" else {}
    rows = make_data(name, rows=8)["train"]
    trainer = getattr(trl, f"{method}Trainer")(
        model, args=args, train_dataset=rows, processing_class=tokenizer, **functions
    )
    assert trainer.train().global_step == 1
    assert [record.message for record in caplog.records if record.name.startswith("trl.data")] == []
