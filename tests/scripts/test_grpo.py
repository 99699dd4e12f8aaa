"""`trl grpo` and `trl rloo`: rewards by name, files in, a model out, errors in one message."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tests.models.words import word_tokenizer
from tests.tiny import tiny_classifier, tiny_model
from trl.rewards.result import RewardError
from trl.scripts import grpo, rloo
from trl.scripts.running import run_script

SCRIPTS = {"grpo": grpo, "rloo": rloo}
REWARDS = """
def cats(completions, **columns):
    return [float(text.count("cat")) for text in completions]


def as_wanted(completions, wanted, **columns):
    return [float(word in text) for text, word in zip(completions, wanted, strict=True)]


def too_few(completions, **columns):
    return [0.0]
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rewards_of_mine.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards_of_mine", raising=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A policy and a reward model with their tokenizers."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("policy", tiny_model("llama")), ("judge", tiny_classifier("llama", num_labels=1))):
        tokenizer = word_tokenizer(eos_token="</s>", pad_token="<pad>", bos_token="<s>")
        model.config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def run(tmp_path, models):
    rows = [{"question": "the cat ", "wanted": "cat"}, {"question": "the mat ", "wanted": "mat"}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed: dict[str, object] = {
        "model_name_or_path": str(models / "policy"), "dataset_name": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path / "out"),
        "column_mapping": {"question": "prompt"}, "report_to": "none", "max_steps": 2, "disable_tqdm": True, "use_cpu": True,
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "logging_steps": 1,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fixed))

    def command(name, *line):
        script = SCRIPTS[name]
        return run_script(script.make_parser(), script.main, ["--config", "run.yaml", *line])

    return command


def logged(out: Path) -> dict[str, float]:
    newest = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    return json.loads((newest / "trainer_state.json").read_text())["log_history"][-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_and_models_judge_together(run, name, tmp_path, models, capsys):
    """By dotted path from the working directory, by name, and by folder, each with its weight."""
    rewards = ["rewards_of_mine.as_wanted", "think_format_reward", str(models / "judge")]
    assert run(name, "--reward_funcs", *rewards, "--reward_weights", "1", "0.5", "2") == 0
    out = capsys.readouterr().out
    assert f"Model saved in {tmp_path / 'out'}" in out
    assert f"To resume: trl {name} with the same options" in out
    found = logged(tmp_path / "out")
    means = [found[f"rewards/{source}/mean"] for source in ("as_wanted", "think_format_reward", "judge")]
    price = 0.05 * found["kl"] if name == "rloo" else 0.0  # taken off a reward per completion, in nats of the whole
    if not price:
        assert found["reward"] == pytest.approx(means[0] + 0.5 * means[1] + 2 * means[2], abs=1e-5)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_is_trained_on_and_evaluated(run, name, tmp_path, capsys):
    line = "--dataset_streaming true --eval_strategy steps --eval_steps 2 --dataset_test_split train"
    more = "--per_device_eval_batch_size 4 --max_steps 3"
    rewards = ("--reward_funcs", "rewards_of_mine.as_wanted")
    assert run(name, *rewards, *line.split(), *more.split()) == 0, capsys.readouterr().err
    assert "eval_rewards/as_wanted/mean" in logged(tmp_path / "out")
    assert "\neval reward " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "reward_funcs is missing"),
        ("--reward_funcs acuracy_reward", "'acuracy_reward' is unknown. Did you mean accuracy_reward? Known are"),
        ("--reward_funcs rewards_of_mine.dogs", "Module 'rewards_of_mine' has ['as_wanted', 'cats', 'too_few']"),
        ("--reward_funcs ./nowhere", "There is no such folder"),
        ("--reward_funcs think_format_reward --reward_weights 1 2", "reward_weights"),
        ("--reward_funcs think_format_reward --per_device_train_batch_size 6", "num_generations"),
        ("--reward_funcs think_format_reward --dataset_streaming true --max_steps -1", "max_steps=-1"),
        ("--reward_funcs think_format_reward --num_generations 1", "num_generations must be a whole number >= 2, got 1"),
        ("--reward_funcs think_format_reward --column_mapping wanted=solution", "prompt"),
        ("--reward_funcs rewards_of_mine.as_wanted --column_mapping question=prompt wanted=word", "needs ['wanted']"),
        (
            "--reward_funcs accuracy_reward --column_mapping question=prompt wanted=answer",
            "needs ['solution'], the data set has the columns ['answer']. Rename one: --column_mapping answer=solution.",
        ),
        ("--reward_funcs think_format_reward --reward_function x", "--reward_function. Did you mean --reward_funcs?"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(run, capsys, line, message):
    assert run("grpo", *line.split()) == 2
    error = capsys.readouterr().err
    assert "trl grpo: error: " in error and message in error and "Traceback" not in error


def test_a_function_that_answers_too_little_stops_the_run(run):
    """While training, so with its traceback."""
    with pytest.raises(RewardError, match="'too_few' gave 1 values, expected 4"):
        run("grpo", "--reward_funcs", "rewards_of_mine.too_few")
