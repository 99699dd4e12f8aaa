"""`trl quickstart`: the task is honest, the data train what they should, the command tells what it did."""

import json
import subprocess
import sys

import pytest

from trl.data.rendering import Chat
from trl.data.spans import assistant_tokens
from trl.scripts.quickstart import main
from trl.scripts.quickstart.evaluation import exact_match
from trl.scripts.quickstart.model import END, build_model, build_tokenizer, count_parameters
from trl.scripts.quickstart.pipeline import default_task
from trl.scripts.quickstart.task import PHRASINGS, Problem, Task, make_task


@pytest.fixture(scope="module")
def task() -> Task:
    return default_task(seed=0)


@pytest.fixture(scope="module")
def tokenizer(task: Task):
    return build_tokenizer(message["content"] for row in task.train_rows() for message in row["messages"])


def test_held_out_sums_are_trained_on_in_no_order_or_phrasing(task: Task):
    trained = {frozenset((problem.left, problem.right)) for problem in task.problems}
    held_out = [frozenset((problem.left, problem.right)) for problem in task.held_out]
    assert not trained & set(held_out)
    assert len(held_out) == len(set(held_out)) == 300
    questions = {row["messages"][0]["content"] for row in task.train_rows()}
    assert not questions & {task.question(problem) for problem in task.held_out}


def test_a_task_with_shared_problems_is_refused():
    with pytest.raises(ValueError, match=r"held-out problems must not be trained on, got 1 .*\(23, 48\)"):
        Task(problems=(Problem(23, 48),), held_out=(Problem(48, 23, phrasing=2),))


@pytest.mark.parametrize("held_out", [0, 10_000])
def test_the_number_of_held_out_problems_is_checked(held_out: int):
    with pytest.raises(ValueError, match="held_out must lie between"):
        make_task(largest_sum=99, held_out=held_out, seed=0)


def test_rows_are_conversations_with_right_answers(task: Task):
    rows = task.train_rows()
    assert len(rows) == len(task.problems)
    for row in rows[:500]:
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        left, right = [
            int(word.strip("?.")) for word in user["content"].split() if word.strip("?.").isdigit()
        ]
        assert assistant["content"] == str(left + right)
    assert {problem.phrasing for problem in task.problems} == set(range(len(PHRASINGS)))


def test_the_task_follows_its_seed(task: Task):
    assert default_task(seed=0) == task
    assert default_task(seed=1).held_out != task.held_out


@pytest.mark.parametrize(
    ("reply", "correct"),
    [
        ("71", True),
        (" 71\n", True),
        ("171", False),
        ("7", False),
        ("71 71", False),
        ("", False),
        ("071", False),
    ],
)
def test_the_checker(task: Task, reply: str, correct: bool):
    assert task.is_correct(Problem(23, 48), reply) is correct


def test_the_trained_tokens_are_the_answer_and_the_stop_token(task: Task, tokenizer):
    messages = task.messages(Problem(23, 48, phrasing=0))
    tokens = assistant_tokens(tokenizer, Chat(messages))
    trained = [token for token, on in zip(tokens.input_ids, tokens.mask, strict=True) if on]
    assert tokenizer.convert_ids_to_tokens(trained) == ["7", "1", END]
    assert tokenizer.eos_token == END
    assert tokenizer.pad_token != END


def test_the_tokenizer_reads_digits_one_by_one_and_loses_nothing(tokenizer):
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    text = "Grüße, 12 Bäume\n\n  für 3 €"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_model_is_small_and_follows_its_seed(tokenizer):
    one, same, other = (build_model(tokenizer, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all((one[name] == same[name]).all() for name in one)
    assert not all((one[name] == other[name]).all() for name in one)
    assert 200_000 <= count_parameters(build_model(tokenizer, seed=0)) <= 2_000_000


def test_replies_do_not_depend_on_the_batch(task: Task, tokenizer):
    model = build_model(tokenizer, seed=0).train()
    problems = task.held_out[:10]
    whole = exact_match(model, tokenizer, problems, 10, task=task)
    assert exact_match(model, tokenizer, problems, 3, task=task) == whole
    assert whole.accuracy == 0.0
    assert model.training


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom trl.scripts.quickstart import main\n"
        "try: main(['--help'])\nexcept SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max_steps" in done.stdout


@pytest.mark.parametrize("options", [["--max_steps", "0"], ["--output_dir", __file__]])
def test_bad_options_end_with_status_2(options: list[str]):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2


@pytest.mark.slow
def test_a_short_run_tells_what_it_did_and_can_be_repeated(tmp_path, capsys):
    options = ["--output_dir", str(tmp_path), "--max_steps", "3", "--no_color"]
    assert main(options) == 0
    first = capsys.readouterr().out
    assert "Replaces" not in first
    for expected in (
        "Exact match on held-out problems after base: 0.0% (0 of 300)",
        "Exact match on held-out problems after sft:",
        "step     3 of 3   loss",
        "Stage by stage",
        f"Model: {tmp_path / 'sft'}",
        f"trl sft --model_name_or_path {tmp_path / 'sft'} --dataset_name {tmp_path / 'train.jsonl'}",
    ):
        assert expected in first
    results = json.loads((tmp_path / "results.json").read_text())
    assert [stage["stage"] for stage in results["stages"]] == ["base", "sft"]
    assert [step for step, _ in results["losses"]["sft"]] == [1, 2, 3]
    assert len(results["answers"]) == 300
    assert set(results["answers"][0]) == {"question", "answer", "base", "sft"}
    assert (tmp_path / "sft" / "model.safetensors").is_file()
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == results["problems"]["train"]

    (tmp_path / "notes.txt").write_text("mine")
    weights = (tmp_path / "sft" / "model.safetensors").read_bytes()
    assert main(options) == 0
    assert "Replaces the results of an earlier run: " in capsys.readouterr().out
    assert (tmp_path / "sft" / "model.safetensors").read_bytes() == weights
    assert json.loads((tmp_path / "results.json").read_text())["losses"] == results["losses"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_whole_run_learns_to_add(tmp_path):
    """The command as a user runs it; the bar of the README, under 3 minutes on two free cores, is not timed here."""
    command = [sys.executable, "-m", "trl.scripts.quickstart", "--output_dir", str(tmp_path), "--seed", "1"]
    subprocess.run(command, check=True, capture_output=True)
    base, sft = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert base["exact_match"] <= 0.02
    assert sft["exact_match"] >= 0.8
