"""Killed at any moment and resumed, a run ends in the same bits as one that was not."""

import json

import pytest
import torch

from tests.trainer.sft_runs import make, model_for
from tests.two_processes import ending

SIGKILLED = -9
# Between two checkpoints, in the middle of an accumulated step, at the end of an epoch, and within the files of the
# first and the third checkpoint (weights, optimiser, scheduler, random state: 4-6 files each).
KILLS = {
    "packing": ["micro:2", "micro:6", "write:1"],
    "accumulation": ["micro:8", "write:2", "micro:5"],
    "streaming": ["micro:6", "write:3", "micro:9"],
    "padding_free": ["micro:9", "write:9", "micro:3"],
    "residuals": ["micro:8", "write:2", "micro:5"],
    "bco-matched": ["micro:6", "write:2", "micro:4"],  # a running mean, and a classifier's file
}

# Checkpoints at steps 3, 6 and 9 of 11, each of two micro-batches; completions are learned from for four steps.
# The moments were drawn at random, once.
KILLS_OF_GROUPS = {
    "grpo": ["rollout:2", "micro:9", "score:3", "write:4"],
    "rloo": ["reward:2", "write:9", "rollout:1", "micro:5"],
    "ppo": ["micro:7", "rollout:2", "reward:1", "write:5", "score:3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kills", [KILLS, KILLS_OF_GROUPS], ids=["rows", "groups"])
def test_killed_runs_end_in_the_same_bits(kills, tmp_path):
    """Killed where the moment falls: in a rollout or its refills, in a reward, in scoring, in an update, in a checkpoint."""
    jobs = [
        [str(tmp_path / f"{kind} {'killed' if number else 'whole'}"), kind, kill]
        for kind, moments in kills.items()
        for number, kill in enumerate(["", *moments, ""])
    ]
    for job in jobs:
        status, written = ending("tests.trainer.resume_worker", *job)
        assert status == (SIGKILLED if job[-1] else 0), written
    assert not list(tmp_path.glob("*/_run-*"))
    for kind in kills:
        expected, found = (
            json.loads((tmp_path / f"{kind} {run}" / "end.json").read_text()) for run in ("whole", "killed")
        )
        assert found["logs"] == expected["logs"]
        assert found == expected
        if kind in ("grpo", "rloo"):
            last = [entry for entry in expected["logs"] if "loss" in entry][-1]
            assert last["tokens/zero_advantage"] > 0 < last["tokens/trained"]
            assert any(entry.get("dynamic_sampling/rounds", 0) > 0 for entry in expected["logs"])


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_saved_one_by_one_are_resumed(architecture, tmp_path):
    """transformers 5 saves the experts of a layer as single matrices, which its Trainer does not find again."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "folder": tmp_path}
    rows = [{"text": "Look up."}, {"text": "Next."}] * 4
    whole, resumed = (make(rows, model=model_for(architecture=architecture), **settings) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())
