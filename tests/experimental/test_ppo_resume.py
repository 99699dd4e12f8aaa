"""Killed within a rollout, its scoring, an update or a checkpoint and resumed, PPO ends in the same bits."""

import json

import pytest

from tests.trainer.test_resume import SIGKILLED, work

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
    ends, log = work(*jobs, module="tests.experimental.ppo_resume")
    assert ends == [0, *[SIGKILLED] * len(KILLS), 0], log
    assert not list(killed.glob("_run-*"))
    expected, found = (json.loads((folder / "end.json").read_text()) for folder in (whole, killed))
    assert found["logs"] == expected["logs"]
    assert found == expected
