import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.models.words import word_tokenizer
from tests.tiny import tiny_model
from trl.scripts import reward
from trl.scripts.parser import TrlParser
from trl.scripts.running import run_script


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    word_tokenizer(eos_token="</s>", pad_token="<pad>", bos_token="<s>").save_pretrained(path)
    return str(path)


@pytest.fixture
def run(tmp_path, model_path):
    path = tmp_path / "rows.jsonl"
    row = {"question": "the cat ", "chosen": "sat on the mat", "rejected": "the mat on"}
    path.write_text((json.dumps(row) + "\n") * 8)
    fixed = {
        "model_name_or_path": model_path, "dataset_name": path, "output_dir": tmp_path / "out", "report_to": "none",
        "max_steps": 4, "disable_tqdm": True, "column_mapping": "question=prompt", "per_device_train_batch_size": 2,
        "learning_rate": 0.01, "logging_steps": 1, "save_strategy": "no",
    }  # fmt: skip

    def command(*line):
        arguments = [str(part) for name, value in fixed.items() for part in (f"--{name}", value)]
        return run_script(reward.make_parser(), reward.main, [*arguments, "--use_cpu", *line])

    return command


def test_the_whole_command(run, tmp_path, capsys):
    assert run("--eval_strategy", "steps", "--eval_steps", "2", "--dataset_test_split", "train[:2]") == 0
    out = capsys.readouterr().out
    assert f"Model saved in {tmp_path / 'out'}" in out
    assert "Last evaluation (step 4): " in out and "eval_accuracy 1" in out
    assert "This run cannot be resumed: no checkpoint was written (--save_strategy no)" in out
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.num_labels == 1


def test_an_adapter_is_one_of_a_classifier(run, tmp_path, caplog):
    assert run("--use_peft", "--lora_target_modules", "q_proj", "v_proj") == 0
    assert "task_type" not in caplog.text
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert torch.cat([w.flatten() for name, w in weights.items() if "score" in name]).any()


def test_bad_input_is_one_message(run, capsys):
    assert run("--center_rewards_coefficient", "-1") == 2
    assert "center_rewards_coefficient must be >= 0" in capsys.readouterr().err
    assert run("--column_mapping", "chosen=answer") == 2
    assert "chosen_input_ids" in capsys.readouterr().err


def test_as_a_part_of_another_parser():
    main = TrlParser()
    parser = reward.make_parser(main.add_subparsers(parser_class=TrlParser))
    assert "center_rewards_coefficient" in parser.format_help()
