"""The main job on real input: GSM8K through `trl sft`, killed with SIGKILL, resumed to the same weights."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from examples.small_model import small_llama, strings, train_tokenizer

from trl.cli import main

ROOT = Path(__file__).resolve().parents[2]
ROWS = 96


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def losses(out: Path) -> list[float]:
    newest = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def slice_of_gsm8k(shared, tmp_path_factory):
    """A model from a config, its tokenizer, and the first rows of GSM8K as they were published."""
    source = shared / "data" / "gsm8k" / "train.jsonl"
    if not source.is_file():
        pytest.skip(f"{source} is not present on this machine")
    folder = tmp_path_factory.mktemp("gsm8k")
    (folder / "train.jsonl").write_text("".join(source.open(encoding="utf-8").readlines()[:ROWS]))
    tokenizer = train_tokenizer(strings(folder / "train.jsonl"), vocabulary=4096)
    for part in (tokenizer, small_llama(tokenizer, seed=0, layers=2, width=128)):
        part.save_pretrained(folder / "model")
    return folder


@pytest.mark.slow
def test_killed_and_resumed_it_ends_in_the_same_weights(slice_of_gsm8k, tmp_path):
    folder = slice_of_gsm8k
    command = [
        "sft", "--model_name_or_path", str(folder / "model"),
        "--dataset_name", str(folder / "train.jsonl"), "--column_mapping", "question=prompt", "answer=completion",
        "--max_length", "256", "--learning_rate", "1e-3", "--per_device_train_batch_size", "4",
        "--gradient_accumulation_steps", "2", "--num_train_epochs", "2", "--save_steps", "4", "--logging_steps", "3",
        "--report_to", "none", "--use_cpu", "true", "--gradient_checkpointing", "false",
    ]  # fmt: skip

    def run(out: Path, *more: str) -> subprocess.Popen:
        log = (tmp_path / f"{out.name}.log").open("a")
        line = [sys.executable, "-m", "trl.cli", *command, "--output_dir", str(out), *more]
        return subprocess.Popen(line, env=environment(), stdout=log, stderr=log)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*command, "--output_dir", str(whole)]) == 0
    process = run(killed)
    deadline = time.monotonic() + 500
    while not (killed / "checkpoint-8").is_dir():
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "killed.log").read_text()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "model.safetensors").exists()
    resumed = run(killed, "--resume_from_checkpoint", "true")
    assert resumed.wait(timeout=500) == 0, (tmp_path / "killed.log").read_text()

    assert digest(killed / "model.safetensors") == digest(whole / "model.safetensors")
    assert losses(killed) == losses(whole)
    assert losses(whole)[-1] < losses(whole)[0] - 1
