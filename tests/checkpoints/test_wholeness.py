"""Checkpoints that lost a part: which file, which other checkpoint, and what can be started anew."""

import fcntl
import json
import logging
import os
import re
from pathlib import Path

import pytest

from tests.checkpoints.made import forget_sums, make_checkpoint
from trl.checkpoints.wholeness import (
    CheckpointError,
    checkpoint_to_load,
    faults,
    naming_weights,
    newest_whole,
    publish,
    synced_sums,
)

FACTS = {"run": "a", "method": "SFT"}
FILES = {  # each needed file, and the part that it belongs to
    "model.safetensors": "", "config.json": "", "trainer_state.json": "", "optimizer.pt": "optimizer", "scheduler.pt": "optimizer",
    "rng_state.pth": "random_state", "progress_0.json": "progress",
}  # fmt: skip


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("file", FILES)
def test_a_lost_file_is_named_with_the_checkpoint_that_is_whole(file, is_there, tmp_path):
    make_checkpoint(tmp_path, 5, **FACTS)
    broken = make_checkpoint(tmp_path, 10, **FACTS)
    if is_there:  # truncated
        (broken / file).write_bytes((broken / file).read_bytes()[:-5])
    else:
        (broken / file).unlink()
    why = "cannot be read, it may be truncated" if is_there else "is missing"
    with pytest.raises(CheckpointError, match=rf"checkpoint-10 is not whole.*{re.escape(file)} {why}") as raised:
        checkpoint_to_load(str(broken), tmp_path)
    assert f"Resume from {tmp_path}/checkpoint-5, which is whole" in str(raised.value)
    part = FILES[file]
    assert (f"resume_without=['{part}']" in str(raised.value)) == bool(part)
    if part:
        assert checkpoint_to_load(str(broken), tmp_path, without=[part]) == broken
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-5"


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("optimizer.pt", "optimizer.pt"), ("scheduler.pt", "scheduler.pt"), ("rng_state.pth", "rng_state.pth"),
        ("model.safetensors", "model.safetensors or adapter_model.safetensors"), ("trainer_state.json", "trainer_state.json"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_program_needs_the_same_parts(file, fault, tmp_path):
    path = make_checkpoint(tmp_path, 5)
    assert faults(path) == {}
    (path / file).unlink()
    assert faults(path) == {fault: "is missing"}


def test_files_that_resuming_does_not_read_may_be_changed(tmp_path):
    path = make_checkpoint(tmp_path, 5)
    for name in ("README.md", "tokenizer.json", "training_args.bin"):
        (path / name).write_text("{half")
    assert faults(path) == {}


def test_true_takes_the_newest_whole_checkpoint_and_says_what_it_skipped(tmp_path, caplog):
    for step in (9, 10, 20):
        make_checkpoint(tmp_path, step, **FACTS)
    (tmp_path / "checkpoint-20" / "optimizer.pt").unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_load(True, tmp_path) == tmp_path / "checkpoint-10"
    assert (
        f"Resuming from {tmp_path}/checkpoint-10. {tmp_path}/checkpoint-20 is not whole: optimizer.pt is missing"
        in caplog.text
    )
    assert checkpoint_to_load(True, tmp_path, without=["optimizer"]) == tmp_path / "checkpoint-20"
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-20 is not whole.*no other whole checkpoint") as raised:
        checkpoint_to_load(True, tmp_path)
    assert "resume_without=['optimizer']" in str(raised.value)


def test_an_error_of_loading_names_the_weights(tmp_path):
    path = make_checkpoint(tmp_path, 5)
    message = r"model.safetensors in .*cannot be loaded into this model: size mismatch"
    with pytest.raises(CheckpointError, match=message), naming_weights(path):
        raise RuntimeError("size mismatch")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["a flipped bit", "zeros", "zeros at the end"])
def test_a_changed_byte_is_named(file, damage, tmp_path):
    broken = make_checkpoint(tmp_path, 10, **FACTS) / file
    content = bytearray(broken.read_bytes())
    if damage == "a flipped bit":
        content[-2 if file.endswith(".json") else len(content) // 2] ^= 1
    else:
        content[0 if damage == "zeros" else -9 :] = bytes(len(content) if damage == "zeros" else 9)
    broken.write_bytes(content)
    found = faults(broken.parent)
    assert list(found) == [file]
    assert re.match("is not as it was written .by its checksum.|cannot be read", found[file])
    with pytest.raises(CheckpointError, match=rf"checkpoint-10 is not whole: {re.escape(file)} "):
        checkpoint_to_load(True, tmp_path)


def test_a_longer_file_and_an_edited_one_that_is_meant(tmp_path):
    path = make_checkpoint(tmp_path, 10, **FACTS)
    (path / "trainer_state.json").write_text('{"known": 12}')
    assert faults(path)["trainer_state.json"].startswith(
        "is not as it was written (13 bytes, 12 were written): it is damaged, or was edited (then remove it from 'files'"
    )
    manifest = json.loads((path / "checkpoint.json").read_text())
    del manifest["files"]["trainer_state.json"]
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    assert faults(path) == {}


def test_checkpoints_whose_manifest_has_no_sums_can_be_resumed(tmp_path):
    path = make_checkpoint(tmp_path, 10, **FACTS)
    forget_sums(path)
    (path / "config.json").write_text('{"known": 2}')
    assert faults(path) == {}
    (path / "config.json").unlink()
    assert faults(path) == {"config.json": "is missing"}


def test_sums_of_several_processes_are_those_of_one(tmp_path):
    path = make_checkpoint(tmp_path, 10)
    (path / "shards").mkdir()
    (path / "shards" / "0.distcp").write_bytes(b"0" * 3_000_000)
    whole = synced_sums(path)
    parts = [synced_sums(path, part=part, parts=3) for part in range(3)]
    assert {name: entry for part in parts for name, entry in part.items()} == whole
    assert sum(map(len, parts)) == len(whole)
    assert whole["shards/0.distcp"][0] == 3_000_000


def test_files_and_folders_are_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path, 10)
    (path / "README.md").write_text("not read by resuming")
    (path / "shards").mkdir()
    (path / "shards" / "0.distcp").write_bytes(b"0")
    events, flush, rename = [], os.fsync, Path.rename

    def fsync(file):
        handle = file if isinstance(file, int) else file.fileno()
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        assert fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY  # files may be read-only
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda self, to: (events.append("rename"), rename(self, to))[1])
    names = [*path.rglob("*"), path / "checkpoint.json", path]
    publish(path, tmp_path / "checkpoint-11", FACTS, replaced=tmp_path / "replaced")
    moment = events.index("rename")
    assert set(events[:moment]) == set(names)
    assert events[moment + 1 :] == [tmp_path]
