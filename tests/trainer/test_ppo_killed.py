"""A step-level loop that is killed anywhere, and loads its state, ends in the same bits; with sharded weights it is the same loop."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.ppo_sharded import KINDS, steps, trainer_of
from tests.trainer.test_resume import SIGKILLED
from tests.two_processes import ending, launch, need_deepspeed

# A state after steps 2, 4 and 6 of 7; a step has four minibatches, a state five files and one renaming, later ones two.
KILLS = [
    "generate:2",
    "micro:11",
    "write:2",
    "rename:1",
    "reward:1",
    "rename:2",
    "score:2",
    "write:3",
    "micro:7",
]


@pytest.mark.slow
def test_a_killed_loop_ends_in_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    jobs = [[str(whole), ""], *[[str(killed), kill] for kill in KILLS], [str(killed), ""]]
    for job in jobs:
        status, written = ending("tests.trainer.ppo_killed", *job)
        assert status == (SIGKILLED if job[-1] else 0), written
    assert [path.name for path in killed.glob("*state*")] == ["state"]
    expected, found = (json.loads((folder / "end.json").read_text()) for folder in (whole, killed))
    assert found == expected
    once, often = (
        [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()] for folder in (whole, killed)
    )
    assert [line[0] for line in once] == [1, 2, 3, 4, 5, 6, 7]
    assert len(often) > len(once)
    assert all(line == once[line[0] - 1] for line in often)  # also steps that were made again


@pytest.fixture(scope="module")
def one_process():
    """What one process finds, with its weights before and after."""
    alone = trainer_of(batch_size=4, mini_batch_size=2, gradient_accumulation_steps=2)
    first = {name: weight.clone() for name, weight in alone.model.state_dict().items()}
    return {**steps(alone, slice(0, 4)), "first": first, "weights": alone.model.state_dict()}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", KINDS)
def test_sharded_steps_equal_those_of_one_process(one_process, tmp_path, how):
    """Two steps of two epochs each: responses, statistics, saved weights; the state is loaded to the same bits."""
    expected = one_process
    need_deepspeed(how)
    launch("tests.trainer.ppo_sharded", str(tmp_path), how, timeout=200)
    found = torch.load(tmp_path / how, weights_only=False)
    assert found["before"] == expected["before"][:2]
    assert found["after"] == expected["after"][:2]
    for one, other in zip(found["stats"], expected["stats"], strict=True):
        plain = [name for name, value in other.items() if np.size(value) == 1 and "time/" not in name]
        assert len(plain) > 25
        assert {name: one[name] for name in plain} == pytest.approx(
            {name: other[name] for name in plain}, rel=1e-4, abs=1e-5
        )
    saved = load_file(Path(tmp_path, f"{how}.model", "model.safetensors"))
    assert saved.keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-5, atol=1e-5, msg=name)
    moved = [float((weight - expected["first"][name]).abs().max()) for name, weight in saved.items()]
    assert max(moved) > 1e-3
