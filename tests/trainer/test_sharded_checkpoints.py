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
from trl.trainer.saving import check_async_save, check_weights

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
    for folder in (run, tmp_path / "mirror"):
        assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
        assert not any(faults(path) for path in checkpoints_in(folder))
    assert not list(tmp_path.glob("*/_run-*"))
    expected = state_of(tmp_path / "whole")
    assert_same(tmp_path / "model 2", expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "model 2").eos_token

    assert main(["consolidate", str(run / "checkpoint-3"), "--out", str(tmp_path / "merged")]) == 0
    assert_same(tmp_path / "merged", expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token
    best = tmp_path / "best"
    assert [path.name for path in checkpoints_in(best)] == ["checkpoint-3", "checkpoint-1"]
    assert main(["consolidate", str(best / "checkpoint-1")]) == 0
    assert_same(tmp_path / "best model", state_of(best / "checkpoint-1-model"))
    for rank in (0, 1):  # training was a step further when the second write went on
        assert (tmp_path / f"errors {rank}").read_text().splitlines() == [
            f"[True] checkpoint-{step} could not be written (async_save): OSError: the disk is full. "
            f"Earlier checkpoints are whole. checkpoint-{step - 1}"
            for step in (2, 3)
        ] + ["[True] training stops checkpoint-1"]
    assert [path.name for path in checkpoints_in(tmp_path / "next")] == ["checkpoint-1"]
    assert [path.name for path in checkpoints_in(tmp_path / "end")] == ["checkpoint-2", "checkpoint-1"]
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


def trainer_with(kind, version=2, **settings):
    plugin = kind and SimpleNamespace(state_dict_type=StateDictType[kind], fsdp_version=version)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    return SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(**settings))


@pytest.mark.parametrize("written", FILES)
@pytest.mark.parametrize("now", FILES)
def test_weights_that_cannot_be_read_are_refused_before_a_process_waits(written, now, tmp_path):
    (tmp_path / FILES[written]).touch()
    trainer = trainer_with(now)
    if written == now or (written, now) == (FULL, None):
        check_weights(trainer, str(tmp_path))
        return
    with pytest.raises(CheckpointError, match="it cannot read the weights"):
        check_weights(trainer, str(tmp_path))


@pytest.mark.parametrize(
    "kind, version, run",
    [(None, 2, "a run without FSDP"), (FULL, 2, f"FSDP2 with {FULL}"), (SHARDED, 1, f"FSDP1 with {SHARDED}")],
)
def test_async_save_is_refused_where_it_cannot_write(kind, version, run):
    with pytest.raises(
        ValueError, match=f"^async_save=True needs FSDP2 with fsdp_state_dict_type: {SHARDED}, got {run}. "
    ):
        check_async_save(trainer_with(kind, version, async_save=True))
    check_async_save(trainer_with(kind, version, async_save=False))
    check_async_save(trainer_with(SHARDED, async_save=True))
