"""Questions as published: `trl grpo` and `trl rloo` raise the share of solutions that have the form which is paid for."""

import importlib
import json
from pathlib import Path

import pytest
from examples.gsm8k_rewards import in_form, is_right

from tests.scripts.test_real_preferences import small, write
from trl.scripts.running import run_script

SHORT = 260  # characters of question and solution: what a small model reads in a moment


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_the_rewards_read_published_solutions(published):
    """Each is right by its own number; four in five have a calculation in every line but the last."""
    answers = [row["answer"] for row in published("gsm8k/train")]
    assert is_right(answers, answers) == [1.0] * len(answers)
    assert sum(in_form(answers)) / len(answers) == pytest.approx(0.787, abs=0.001)
    shifted = answers[1:] + answers[:1]
    assert sum(is_right(answers, shifted)) < 0.05 * len(answers)


def test_what_is_in_form():
    steps = "She has <<48/2=24>>24.\nThen <<24+1=25>>25.\n"
    said = [
        steps + "#### 25",
        steps + "#### 1,025\n",
        steps,
        "#### 25",
        steps + "So.\n#### 25",
        steps + "#### 25 cm",
    ]
    assert in_form(said) == in_form([[{"role": "assistant", "content": text}] for text in said])
    assert in_form(said) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert is_right(said, ["#### 25", "#### 1025", "#### 25", "#### 25.0", "#### 24", "#### 25"]) == [
        1.0, 1.0, 0.0, 1.0, 0.0, 0.0,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def warmed(published, tmp_path_factory):
    """A small model that was fine-tuned on short solutions, and their questions."""
    folder = tmp_path_factory.mktemp("gsm8k")
    rows = [
        row
        for row in published("gsm8k/train")
        if len(row["question"] + row["answer"]) < SHORT and in_form([row["answer"]]) == [1.0]
    ][:512]
    data = write(folder / "data", train=rows)
    model = small(folder / "model", [text for row in rows for text in row.values()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
        run("sft", model, data, folder / "warm", "--column_mapping question=prompt answer=completion --num_train_epochs 4 "
            "--learning_rate 5e-3 --per_device_train_batch_size 16")  # fmt: skip
    return folder / "warm", data


def run(command: str, model: Path, data: Path, out: Path, line: str) -> list[dict[str, float]]:
    """What `trl COMMAND` logs."""
    script = importlib.import_module(f"trl.scripts.{command}")
    fixed = (
        f"--model_name_or_path {model} --dataset_name {data / 'train.jsonl'} --output_dir {out} --use_cpu --report_to none --disable_tqdm "
        "true --save_strategy steps --save_steps 1000 --gradient_checkpointing false --seed 0"
    )
    assert run_script(script.make_parser(), script.main, [*fixed.split(), *line.split()]) == 0
    newest = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["grpo"])
def test_solutions_come_into_form(warmed, tmp_path, command):
    """Of 320 completions each: 21 to 26 % in form in the first five steps, 65 to 72 % in the last five (GRPO, four orders of the
    data); 25 to 32 and 62 to 67 % (RLOO)."""
    model, data = warmed
    line = (
        "--column_mapping question=prompt --reward_funcs examples.gsm8k_rewards.in_form examples.gsm8k_rewards.is_right "
        "--num_generations 8 --per_device_train_batch_size 64 --max_completion_length 64 --learning_rate 1e-3 --max_steps 30 "
        "--logging_steps 5 --save_steps 30"
    )
    logs = run(command, model, data, tmp_path, line)
    shares = [entry["rewards/in_form/mean"] for entry in logs]
    assert shares[-1] > shares[0] + 0.2
    assert all(0 <= entry["rewards/is_right/mean"] < 0.2 for entry in logs)
