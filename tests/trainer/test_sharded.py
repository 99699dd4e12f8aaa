"""FSDP2 and DeepSpeed ZeRO-3 over gloo: three steps of SFT, KTO and distillation of two processes equal those of one, to 1e-5; with sp_size=2 too."""

import functools
import json

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from tests.trainer.sharded_worker import KINDS, METHODS, SPREAD, models_of, three_steps
from tests.two_processes import launch, need_deepspeed

LOGGED = {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "kl", "rewards/margins"}


@functools.cache
def alone(method):
    """A run of one process."""
    return three_steps(method, models_of(method), per_device_train_batch_size=8 if method == "kto" else 4)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", KINDS)
def test_three_steps_equal_those_of_one_process(how, tmp_path):
    need_deepspeed(how)
    launch("tests.trainer.sharded_worker", str(tmp_path), how)

    for method in METHODS:
        single = alone(method.removesuffix(SPREAD))
        expected = single.model.state_dict()
        if method == "self-distillation":
            expected = get_peft_model_state_dict(single.model)
        found = load_file(next((tmp_path / method).glob("*model.safetensors")))
        assert found.keys() <= expected.keys()
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5, msg=name)
        log = json.loads((tmp_path / method / "log.json").read_text())
        if method.startswith("kto"):
            assert single.state.log_history[0]["kl"] > 0.5
        for one, other in zip(log, single.state.log_history, strict=True):
            for name in LOGGED & other.keys():
                assert one[name] == pytest.approx(other[name], rel=1e-4), (method, name)
