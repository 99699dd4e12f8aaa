"""Preferences of people, as published: a short run of each command raises the figure of unseen rows."""

import importlib
import json
from pathlib import Path

import pytest
from examples import small_model

from trl.scripts.running import run_script

SHORT = 600  # characters of a dialogue or solution: one that a small model reads in a moment


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(folder: Path, **splits: list[dict]) -> Path:
    folder.mkdir()
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def small(folder: Path, texts: list[str]) -> Path:
    """A model from a config, and a tokenizer trained on the texts."""
    tokenizer = small_model.train_tokenizer(texts, vocabulary=1000)
    for part in (small_model.small_llama(tokenizer, seed=0, layers=1, width=128), tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def harmless(published, tmp_path_factory):
    """Short dialogues of hh-rlhf, raw, with their own split; and a model."""
    folder = tmp_path_factory.mktemp("harmless")
    splits = {
        name: [row for row in published(f"hh_harmless/{name}") if max(map(len, row.values())) < SHORT]
        for name in ("train", "test")
    }
    texts = [text for row in splits["train"] for text in row.values()]
    return small(folder / "model", texts), write(folder / "data", **splits)


def evaluations(command: str, inputs: tuple[Path, Path], out: Path, line: str) -> list[dict[str, float]]:
    """What `trl COMMAND` says of the held-out split before and after."""
    model, data = inputs
    script = importlib.import_module(f"trl.scripts.{command}")
    fixed = (
        f"--model_name_or_path {model} --dataset_name {data} --output_dir {out} --use_cpu --report_to none --disable_tqdm true "
        "--eval_strategy epoch --eval_on_start true --save_strategy epoch --gradient_checkpointing false --seed 0 "
        "--per_device_train_batch_size 16 --per_device_eval_batch_size 32"
    )
    assert run_script(script.make_parser(), script.main, [*fixed.split(), *line.split()]) == 0
    newest = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "eval_loss" in entry]


@pytest.mark.slow
def test_dpo_on_raw_dialogues(harmless, tmp_path):
    """157 unseen pairs: no preference before, 0.55 after, by a margin of its own sign."""
    line = "--dialogue_marker Assistant: --learning_rate 1e-3 --num_train_epochs 1"
    before, after = evaluations("dpo", harmless, tmp_path, line)
    assert before["eval_rewards/accuracies"] == 0
    assert before["eval_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert after["eval_rewards/accuracies"] > 0.5
    assert after["eval_rewards/margins"] > 0
