"""FSDP2 and DeepSpeed ZeRO-3 over gloo: three SFT steps of two processes equal those of one, to 1e-5."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import tiny_model
from tests.trainer.one_step import launch, run
from tests.trainer.sharded_worker import KINDS, STEPS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", KINDS)
def test_three_steps_equal_those_of_one_process(how, tmp_path):
    if how == "zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install trl[deepspeed]")
    launch("tests.trainer.sharded_worker", str(tmp_path), how)

    single, _ = run(tiny_model("llama"), **{**STEPS, "per_device_train_batch_size": 4})
    expected = single.model.state_dict()
    found = load_file(tmp_path / "model.safetensors")
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    log = json.loads((tmp_path / "log.json").read_text())
    for one, other in zip(log, single.state.log_history, strict=True):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
            if name in other:
                assert one[name] == pytest.approx(other[name], rel=1e-4), name
