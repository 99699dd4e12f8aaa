"""A run that goes on with 4, 2, then 3 processes or 1 equals one that never stopped, to 1e-10 in float64."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.contracts.methods import CLOCKS
from tests.trainer.elastic_worker import CASES, trained
from tests.two_processes import launch
from trl.checkpoints.spread import check_spread, compared_settings
from trl.checkpoints.wholeness import CheckpointError

OF_TIME = (*CLOCKS, "epoch", "flos", "step_time")
LEGS = {4: ("1", ("noise", "grpo")), 2: ("2", tuple(CASES)), 3: ("3", ("noise", "stream", "dpo"))}


def assert_same_ends(found, expected, case):
    (weights, logs), (whole_weights, whole_logs) = found, expected
    for name, weight in whole_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10, msg=f"{case} {name}")
    for log, whole in zip(logs, whole_logs, strict=True):
        for name in (name for name in whole if not any(word in name for word in OF_TIME)):
            tolerance = 1e-6 if name in ("loss", "train_loss") else 1e-9  # transformers sums losses in float32
            assert log[name] == pytest.approx(whole[name], rel=tolerance, abs=1e-10), (case, name)


SETTINGS = {"processes": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
TWICE = {"gradient_accumulation_steps": 6}


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"processes": 2}, r"steps of 24 \(.* 2 x .* 3 x 4 processes\) rows, and this run has 12 .*Set .*=2 and .*=6, or ignore_data"),
        ({"processes": 6, "per_device_train_batch_size": 3}, "Set per_device_train_batch_size=2 and gradient_accumulation_steps=2"),
        ({"processes": 24}, "Set per_device_train_batch_size=1 and gradient_accumulation_steps=1"),
        ({"processes": 5}, "5 processes cannot share 24 rows: launch one of 1, 2, 3, 4, 6, 8, 12, 24"),
        ({"processes": 8, "sp_size": 4, **TWICE, "dataloader_drop_last": True}, "rounds of 8 rows, and this run has 4: .* be 8"),
        ({"processes": 2, **TWICE, "stream": 2}, r"several workers read \(dataloader_num_workers=2\)"),
        ({"processes": 2, **TWICE, "rollouts": {"rows": 24, "together": 6}},
         r"other rows of its rollouts \(rows 48, now 24, together 3, now 6\)\. Set generation_batch_size"),
    ],
)  # fmt: skip
def test_other_rows_are_refused(now, message):
    workers, rollouts = now.pop("stream", 0), now.pop("rollouts", None)
    recorded = {"settings": SETTINGS, "rollouts": {"rows": 48, "together": 3}}
    facts = {"settings": {**SETTINGS, **now}, "data": None if workers else {"rows": 29}, "workers": workers}
    with pytest.raises(CheckpointError, match=message):
        check_spread(Path("run/checkpoint-3"), recorded, {**facts, **({"rollouts": rollouts} if rollouts else {})})


def test_the_same_rows_are_not_refused():
    facts = {"data": {"rows": 29}, "settings": {**SETTINGS, "processes": 12, "gradient_accumulation_steps": 1}}
    check_spread(Path("run/checkpoint-3"), {"settings": SETTINGS}, facts)
    check_spread(Path("run/checkpoint-3"), {"settings": {}}, facts)  # of an older run
    check_spread(Path("run/checkpoint-3"), {"settings": SETTINGS}, {**facts, "settings": {**SETTINGS, "processes": 4}})
    assert compared_settings(SETTINGS, facts["settings"]) == {}
    assert compared_settings(SETTINGS, {**SETTINGS, "processes": 2}) == SETTINGS


def forget_files(checkpoint):
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    (checkpoint / "checkpoint.json").write_text(json.dumps({**manifest, "files": []}))


def test_noise_of_other_micro_batches_is_said_and_states_of_fsdp_are_refused(tmp_path, caplog):
    trained("noise", str(tmp_path), 1)
    trained(
        "noise",
        str(tmp_path),
        resume=str(tmp_path / "checkpoint-1"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
    )
    assert "with micro-batches of 4 rows and 3 to a process and step, which were of 1 and 12" in caplog.text
    assert "dropout and NEFTune's noise differ from those of a run that was not stopped" in caplog.text
    (tmp_path / "checkpoint-1" / "optimizer.pt").rename(tmp_path / "checkpoint-1" / "optimizer.bin")
    forget_files(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"written with FSDP, and this run is without it.*resume_without"):
        trained("noise", str(tmp_path), resume=str(tmp_path / "checkpoint-1"))


@pytest.mark.distributed
def test_other_numbers_of_processes_make_the_same_run(tmp_path):
    for processes, (step, cases) in LEGS.items():
        shutil.rmtree(tmp_path / "noise", ignore_errors=True)  # it is resumed from a mirror
        launch("tests.trainer.elastic_worker", str(tmp_path), step, ",".join(cases), processes=processes)
    assert [path.name for path in tmp_path.glob("uploads of *")] == ["uploads of 0"]
    for case in CASES:
        whole = trained(case, str(tmp_path / "whole"))
        expected = whole.model.state_dict(), whole.state.log_history
        if case in LEGS[3][1]:
            assert_same_ends(torch.load(Path(tmp_path, case, "end.pt")), expected, case)
        if case in LEGS[4][1]:
            alone = trained(case, str(tmp_path / "one"), resume=str(tmp_path / case / "checkpoint-2"))
            assert_same_ends((alone.model.state_dict(), alone.state.log_history), expected, f"{case} on one")
