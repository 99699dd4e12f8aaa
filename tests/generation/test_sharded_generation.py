"""Completions from sharded weights are those of whole ones, and training goes on as if there had been none."""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file

from tests.generation.sharded_worker import Generate, train
from tests.trainer.one_step import launch


@pytest.fixture(scope="module")
def whole():
    """What one process generates before each step, and its trained weights."""
    callback = Generate()
    trainer = train(callback, rows=4)
    return callback.seen, {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["fsdp2", "zero3", "zero3_layers"])
def test_sharded_generation(how, whole, tmp_path):
    if how != "fsdp2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install trl[deepspeed]")
    launch("tests.generation.sharded_worker", str(tmp_path), how)
    expected, weights = whole
    seen = torch.load(tmp_path / "seen.pt")
    assert len(seen) == 3
    for step, other in zip(seen, expected, strict=True):
        for (ids, logps), (other_ids, other_logps) in zip(step, other, strict=True):
            assert ids == other_ids
            torch.testing.assert_close(logps, other_logps, rtol=0, atol=1e-3)
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-4, msg=name)
