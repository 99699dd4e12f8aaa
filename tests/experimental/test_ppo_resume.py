"""Killed within a rollout, its scoring, an update or a checkpoint and resumed, PPO ends in the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIGKILLED = -9
# Four optimiser steps to a batch of rollouts, a checkpoint every three: checkpoints 3 and 6, 9 lie within one.
KILLS = [
    "micro:7",
    "rollout:2",
    "micro:3",
    "reward:1",
    "write:5",
    "score:3",
    "micro:9",
    "write:9",
    "rollout:1",
]


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    jobs = [
        [str(whole), "plain", ""],
        *[[str(killed), "plain", kill] for kill in KILLS],
        [str(killed), "plain", ""],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.experimental.ppo_resume", json.dumps(jobs)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.rpartition("ended")[2])
    assert ends == [0, *[SIGKILLED] * len(KILLS), 0], done.stderr
    assert not list(killed.glob("_run-*"))
    expected, found = (json.loads((folder / "end.json").read_text()) for folder in (whole, killed))
    assert found["logs"] == expected["logs"]
    assert found == expected
