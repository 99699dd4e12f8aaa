"""Sharded checkpoints of FSDP2 (SHARDED_STATE_DICT): whole or absent, resumed to the same bits, merged, or refused in a line."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import StateDictType
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.sharded_checkpoints_worker import trained
from tests.two_processes import launch
from trl.checkpoints.wholeness import CheckpointError, checkpoints_in, faults
from trl.cli.main import main
from trl.trainer.saving import check_weights

WORKER = "tests.trainer.sharded_checkpoints_worker"


def state_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()


def assert_same(folder, expected, tolerance=0.0):
    state = state_of(folder)
    assert state.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=tolerance, msg=f"{folder} {name}")


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_runs_end_in_the_same_bits_and_checkpoints_are_merged(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(AssertionError, match="-9"):
        launch(WORKER, str(tmp_path), "kill")
    assert [path.name for path in checkpoints_in(run)] == ["checkpoint-2", "checkpoint-1"]
    launch(WORKER, str(tmp_path), "")
    assert not list(run.glob("_run-*")) and not any(faults(path) for path in checkpoints_in(run))
    expected = state_of(tmp_path / "whole")
    assert_same(tmp_path / "model 2", expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "model 2").eos_token

    assert main(["consolidate", str(run / "checkpoint-3"), "--out", str(tmp_path / "merged")]) == 0
    assert_same(tmp_path / "merged", expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token
    alone = trained(tmp_path / "alone", save_strategy="no").model.state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-10)

    assert "this run is with FSDP (fsdp_state_dict_type: FULL_STATE_DICT)" in (tmp_path / "refused").read_text()
    with pytest.raises(CheckpointError, match=r"SHARDED_STATE_DICT\), and this run is without FSDP.*trl consolidate"):
        trained(tmp_path / "one", resume=str(run / "checkpoint-2"))

    shutil.rmtree(run / "checkpoint-3")
    launch(WORKER, str(tmp_path), "", processes=4)
    assert_same(tmp_path / "model 4", expected, 1e-10)


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
FILES = {SHARDED: "pytorch_model_fsdp_0", FULL: "pytorch_model_fsdp.bin", None: "model.safetensors"}


@pytest.mark.parametrize("written", FILES)
@pytest.mark.parametrize("now", FILES)
def test_weights_that_cannot_be_read_are_refused_before_a_process_waits(written, now, tmp_path):
    (tmp_path / FILES[written]).touch()
    plugin = now and SimpleNamespace(state_dict_type=StateDictType[now])
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    if written == now or (written, now) == (FULL, None):
        check_weights(trainer, str(tmp_path))
        return
    with pytest.raises(CheckpointError, match="it cannot read the weights"):
        check_weights(trainer, str(tmp_path))
