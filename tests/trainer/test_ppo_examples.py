"""The examples of step-level PPO run offline with `--tiny`, reach a higher reward, and leave a policy that loads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trl import AutoModelForCausalLMWithValueHead

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gain"),
    [("ppo_sentiment", 0.2), ("detoxification", 2.0), ("multi_adapter_rl", 0.3), ("calculator", 0.05)],
)
def test_an_example_learns(name, gain, tmp_path):
    command = [sys.executable, f"examples/{name}.py", "--tiny", "--output_dir", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = map(float, re.search(r": (-?[\d.]+) -> (-?[\d.]+) over 40 steps", done.stdout).groups())
    assert last > first + gain, done.stdout
    if name != "multi_adapter_rl":  # which saves adapters
        AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    else:
        assert (tmp_path / "adapter_model.safetensors").is_file()
