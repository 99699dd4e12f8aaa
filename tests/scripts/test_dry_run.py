"""`--dry_run true` of every training command: settings, rows with what is trained, memory; nothing is written."""

import importlib
import json
import re

import pytest

from trl.cli.main import COMMANDS
from trl.scripts.running import run_script

PAIR = {"prompt": "Q: How many?", "chosen": " Seven apples.", "rejected": " Next."}
QUESTION = {"prompt": "How many apples are left?"}
# Rows of each command, and what of them is shown as trained.
ROWS = {
    "sft": (
        {"prompt": "Q: How many?", "completion": " Seven apples."},
        "Q: How many?>> Seven apples.<|im_end|><<",
    ),
    "dpo": (PAIR, "chosen (4 tokens, 4 trained): >> Seven apples.<|im_end|><<"),
    "reward": (PAIR, ">>Q: How many? Next.<|im_end|><<"),
    "kto": ({"prompt": "Q: How many?", "completion": " Seven.", "label": True}, ">> Seven.<|im_end|><<"),
    "orpo": (PAIR, "chosen (4 tokens, 4 trained): >> Seven apples.<|im_end|><<"),
    "cpo": (PAIR, "chosen (4 tokens, 4 trained): >> Seven apples.<|im_end|><<"),
    "bco": ({"prompt": "Q: How many?", "completion": " Seven.", "label": True}, ">> Seven.<|im_end|><<"),
    "prm": (
        {"prompt": "Q: How many?", "completions": [" Seven", " apples."], "labels": [True, False]},
        "trained",
    ),
    "gold": (
        {"messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven"}]},
        "trained",
    ),
    "gkd": ({"prompt": "Q: How many?", "completion": " Seven."}, ">> Seven.<|im_end|><<"),
    "distillation": (QUESTION, "0 trained): How many apples are left?"),
    "grpo": (QUESTION, "0 trained): How many apples are left?"),
    "rloo": (QUESTION, "0 trained): How many apples are left?"),
}


@pytest.fixture
def run(tmp_path, model_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def command(name, *line):
        rows = tmp_path / "rows.jsonl"
        rows.write_text((json.dumps(ROWS[name][0]) + "\n") * 8)
        module = importlib.import_module(COMMANDS[name].module)
        fixed = (
            f"--model_name_or_path {model_path} --dataset_name {rows} --output_dir {tmp_path / 'out'} --use_cpu "
            "--report_to none --dry_run true"
        )
        needs = {
            "grpo": ["--reward_funcs", "think_format_reward"],
            "gkd": ["--teacher_model_name_or_path", str(model_path)],
        }
        rewards = needs.get({"rloo": "grpo", "distillation": "gkd", "gold": "gkd"}.get(name, name), [])
        assert run_script(module.make_parser(), module.main, [*fixed.split(), *rewards, *line]) == 0
        return capsys.readouterr().out

    return command


def sizes(out):
    """The figures of the memory table, in MiB."""
    return {name: float(size) for name, size in re.findall(r"^  (\w+).* ([\d.]+) MiB$", out, re.MULTILINE)}


@pytest.mark.parametrize("name", ROWS)
def test_a_dry_run_shows_the_data_and_writes_nothing(run, name, tmp_path):
    out = run(name, "--learning_rate", "0.125")
    shown = re.findall(r"^  (\w+)", out.partition("\nRow 0")[0], re.MULTILINE)
    assert not {"dry_run", "generation_batch_size", "steps_per_generation"} & set(shown)
    assert ROWS[name][1] in out
    assert re.search(r"^  learning_rate +0\.125$", out, re.MULTILINE)
    assert all(default not in out for default in ("weight_decay", "model_init_kwargs", "f_divergence_type"))
    assert "KL_completion" not in out or re.search(r"KL_completion \(\d+ tokens, 0 trained\)", out)
    assert out.count("Row ") == 2 and "Dry run: nothing was trained or written." in out
    assert not (tmp_path / "out").exists()
    weights = sizes(out)["weights"]
    assert weights > 0 and sizes(out)["optimizer"] == pytest.approx(2 * weights, abs=0.151)  # of rounded figures
    assert "  16.0 bytes for each trained weight (float32; saved in float32)\n" in out


def test_memory_of_an_adapter_is_that_of_its_own_weights(run, tmp_path):
    (tmp_path / "out").mkdir()
    out = run("sft", "--use_peft", "--lora_r", "64", "--lora_target_modules", "q_proj", "--optim", "sgd")
    found = sizes(out)
    adapter = 2 * (64 * 32 + 32 * 64) * 4 / 2**20  # two layers of 32 x 32, float32
    assert found["gradients"] == pytest.approx(adapter, abs=0.051) and found["optimizer"] == 0
    assert found["together"] == pytest.approx(found["weights"] + found["gradients"], abs=0.11)
    assert (tmp_path / "out").is_dir()  # it was there before
