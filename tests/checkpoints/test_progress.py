"""What a checkpoint keeps of the sums between two logs, and what happens where a part of it is missing."""

import json

import pytest
import torch.distributed as dist

from trl.checkpoints.progress import load_progress, save_progress, together
from trl.checkpoints.wholeness import CheckpointError

STATES = [
    {"processes": 2, "copies": 1, "loss_since_log": 1.0, "loss_before_log": 7.0, "last_logged_step": 4, "tokens_seen": 30,
     "metrics": {"sums": {"accuracy": (3.0, 4.0)}, "extremes": {}}},
    {"processes": 2, "copies": 1, "loss_since_log": 2.0, "loss_before_log": 7.0, "last_logged_step": 4, "tokens_seen": 12,
     "metrics": {"sums": {"accuracy": (1.0, 2.0), "aux_loss": (5.0, 1.0)}, "extremes": {"max": 9.0}}},
]  # fmt: skip


def saved(folder):
    for rank, state in enumerate(STATES):
        save_progress(folder, rank=rank, state=state)
    return folder


def test_each_process_goes_on_with_its_own(tmp_path):
    for rank, state in enumerate(STATES):
        found = load_progress(saved(tmp_path), rank=rank, processes=2)
        assert found == json.loads(json.dumps(state))


def test_another_number_of_processes_loses_nothing(tmp_path):
    first, second, third = (load_progress(saved(tmp_path), rank=rank, processes=3) for rank in range(3))
    assert first is not None
    assert first["tokens_seen"] == 42
    assert first["metrics"]["sums"] == {"accuracy": (4.0, 6.0), "aux_loss": (5.0, 1.0)}
    for other in (second, third):
        assert other is not None
        assert (other["tokens_seen"], other["metrics"]["sums"]) == (0, {})
    assert {state["loss_since_log"] for state in (first, second, third)} == {1.5}  # a mean over processes
    assert {state["loss_before_log"] for state in (first, second, third)} == {7.0}
    assert first["more_extremes"] == [{"max": 9.0}]


def test_processes_that_share_rows_count_them_once(tmp_path):
    copies = load_progress(saved(tmp_path), rank=0, processes=4, copies=2)  # STATES are those of one copy
    assert copies is not None
    assert copies["tokens_seen"] == 84
    assert copies["metrics"]["sums"]["accuracy"] == (8.0, 12.0)


def test_a_missing_file_is_said(tmp_path, caplog):
    assert load_progress(tmp_path, rank=0, processes=1) is None
    assert "start from zero" in caplog.text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CheckpointError("step 3 lost a part"), CheckpointError),
        (FileNotFoundError("no checkpoint in run"), FileNotFoundError),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "odd"), ValueError),
        (TypeError("odd"), RuntimeError),
    ],
)
def test_an_error_of_another_process_keeps_its_kind_and_names_that_process(monkeypatch, error, kind):
    """Programs that catch it do so in every process."""
    sent = []

    def gather(outcomes, mine, group=None):
        sent.append(mine)
        outcomes[:] = (sent * 2)[:2]

    def fail():
        raise error

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(type(error)) as own:
        together(fail)
    assert own.value is error
    with pytest.raises(kind, match="in process 0: ") as others:
        together(lambda: 1)
    assert type(others.value) is kind and str(error) in str(others.value)
