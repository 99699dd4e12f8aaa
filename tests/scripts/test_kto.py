import json

import pytest

from tests.models.words import word_tokenizer
from tests.tiny import tiny_model
from trl.scripts import kto
from trl.scripts.running import run_script


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "model"
    tiny_model("llama").save_pretrained(path)
    word_tokenizer(eos_token="</s>", pad_token="<pad>", bos_token="<s>").save_pretrained(path)

    def command(rows, *line):
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        fixed = {
            "model_name_or_path": path, "dataset_name": data, "output_dir": tmp_path / "out", "report_to": "none",
            "use_cpu": "true", "max_steps": 2, "disable_tqdm": "true", "per_device_train_batch_size": 4,
        }  # fmt: skip
        words = [word for name, value in fixed.items() for word in (f"--{name}", str(value))]
        return run_script(kto.make_parser(), kto.main, [*words, *line])

    return command


ROWS = [
    {"question": "the cat ", "answer": "sat on the mat", "good": True},
    {"question": "the cat ", "answer": "the the", "good": False},
] * 4
RENAMES = ("--column_mapping", "question=prompt", "answer=completion", "good=label")


def test_the_whole_command(run, tmp_path, capsys):
    assert (
        run(
            ROWS,
            *RENAMES,
            "--eval_strategy",
            "steps",
            "--eval_steps",
            "2",
            "--dataset_test_split",
            "train[:4]",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert f"Model saved in {tmp_path / 'out'}" in out
    assert "eval_rewards/margins" in out or "rewards/margins" in out


def test_pairs_are_taken_apart(run, capsys):
    pairs = [{"prompt": "the cat ", "chosen": "sat on the mat", "rejected": "the the"}] * 4
    assert run(pairs, "--loss_type", "apo_zero_unpaired") == 0
    assert "Model saved" in capsys.readouterr().out


def test_a_label_that_is_no_truth_value(run, capsys):
    assert run([{**row, "good": "yes"} for row in ROWS], *RENAMES) != 0
    assert "label" in capsys.readouterr().err
