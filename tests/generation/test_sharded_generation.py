"""Completions from sharded weights are those of whole ones, and training goes on as if there had been none."""

import pytest
import torch
from safetensors.torch import load_file

from tests.generation.sharded_worker import Generate, train
from tests.two_processes import launch, need_deepspeed


@pytest.fixture(scope="module")
def whole():
    """What one process generates before each step, few and more completions, and its trained weights."""
    few, more = Generate(more=False), Generate(more=True)
    trainer = train(few, more, rows=4)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return (few.seen, more.seen), weights


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["fsdp2", "zero3", "zero3_layers"])
def test_sharded_generation(how, whole, tmp_path):
    """Also that weights are gathered once per phase: see `sharded_worker`."""
    need_deepspeed(how)
    launch("tests.generation.sharded_worker", str(tmp_path), how)
    (few, more), weights = whole
    for process in (0, 1):
        found = torch.load(tmp_path / f"process_{process}.pt")
        assert found["fallbacks"] == (["its weights stay sharded"] if how == "zero3_layers" else [])
        check_same(found["seen"], more if process and how != "zero3_layers" else few)
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-4, msg=name)


def check_same(seen, expected):
    assert len(seen) == len(expected) == 3
    assert [[ids for ids, _ in step] for step in seen] == [[ids for ids, _ in step] for step in expected]
    for step, other in zip(seen, expected, strict=True):
        for (_, logps), (_, other_logps) in zip(step, other, strict=True):
            torch.testing.assert_close(logps, other_logps, rtol=0, atol=1e-3)
