"""A mirror of checkpoints: whole or absent at every byte, tried again after errors, and resumed from to the same bits."""

import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import fsspec
import pytest
from datasets import Dataset
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoints.made import make_checkpoint
from tests.trainer.sft_runs import make
from trl.checkpoints import mirror
from trl.checkpoints.mirror import ARRIVING, Mirror, Uploads
from trl.checkpoints.wholeness import MANIFEST, CheckpointError, faults, files_in, over_limit
from trl.scripts.loading import checkpoint_to_resume

FACTS = {"run": "r", "method": "SFT", "model": {}, "data": None, "settings": {}}
ROWS = [{"text": text} for text in ("Look up.", "Next.", "It is blue.", "The sky?")] * 2


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def s3():
    """A stand-in of S3: moto's server in this process, asked over HTTP."""
    server = pytest.importorskip("moto.server", reason="moto and flask stand in for S3")
    pytest.importorskip("s3fs", reason="fsspec opens s3:// with it")
    names = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    place = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    place.start()
    host, port = place.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # of an earlier server
        yield fsspec.filesystem("s3")
    place.stop()


@pytest.fixture(params=["memory", "s3"])
def place(request, tmp_path):
    """The file system and the URL of an empty mirror."""
    fs, name = request.getfixturevalue(request.param), f"{request.param}-{tmp_path.name.replace('_', '-')}".lower()[:60]
    fs.mkdir(name)
    return fs, f"{request.param}://{name}"


def checkpoint(folder, step):
    return make_checkpoint(folder, step, **FACTS)


def upload(url, *checkpoints, limit=None):
    uploads = Uploads(Mirror(url), limit)
    for path in checkpoints:
        uploads.add(path)
    uploads.finish()


def whole(url):
    return [name for name, manifest in Mirror(url).checkpoints().items() if manifest]


def test_what_is_over_the_limit():
    names = [f"checkpoint-{step}" for step in (2, 4, 6, 8)]
    assert over_limit(names, "checkpoint-6", "", None) == []
    assert over_limit(names, "checkpoint-6", "", 2) == ["checkpoint-2", "checkpoint-8"]
    assert over_limit(names, "checkpoint-6", "checkpoint-2", 1) == ["checkpoint-4", "checkpoint-8"]
    assert over_limit(names[:2], "checkpoint-6", "", 1) == ["checkpoint-2"]  # the newest is not uploaded yet


def test_a_checkpoint_goes_there_and_comes_back(place, tmp_path):
    (_, url), written = place, checkpoint(tmp_path / "run", 2)
    (written / "value").mkdir()
    (written / "value" / "notes.txt").write_text("in a folder")
    upload(f"{url}/r", written)
    back = Mirror(f"{url}/r").fetch(tmp_path / "other")
    assert files_in(back) == files_in(written) and not faults(back)
    for name in files_in(written):
        assert (back / name).read_bytes() == (written / name).read_bytes(), name
    assert Mirror(f"{url}/r").fetch(tmp_path / "other") is None  # there is a whole one
    assert Mirror(f"{url}/nothing").fetch(tmp_path / "third") is None


def test_a_process_killed_within_any_file_leaves_a_whole_checkpoint(tmp_path):
    first, second, again = (
        checkpoint(tmp_path / "run", 1),
        checkpoint(tmp_path / "run", 2),
        checkpoint(tmp_path / "b", 1),
    )
    url = f"file://{tmp_path}/mirror"
    upload(url, first)
    count = len(files_in(second))
    for number in range(1, count + 1):
        assert killed_within(number, url, second) == -signal.SIGKILL
        assert whole(url) == ["checkpoint-1"], number
    assert [*Mirror(url).checkpoints()] == ["checkpoint-2", "checkpoint-1"]
    assert killed_within(count + 1, url, second) == 0
    assert whole(url) == ["checkpoint-2", "checkpoint-1"]
    (again / "trainer_state.json").write_text('{"known": 2}')
    (again / MANIFEST).write_text(json.dumps({**json.loads((again / MANIFEST).read_text()), "date": "other"}))
    assert killed_within(3, url, again) == -signal.SIGKILL  # in the place of the first
    assert whole(url) == ["checkpoint-2"]


def killed_within(number, url, path):
    """The exit status of a process that dies within the N-th file of an upload, half of it written."""
    child = os.fork()
    if not child:
        left = [number]

        def put(self, local, remote, **_):
            write(remote, Path(local).read_bytes())

        def write(remote, content):
            left[0] -= 1
            with open(remote, "wb") as file:
                file.write(content if left[0] else content[: len(content) // 2])
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        LocalFileSystem.put_file, LocalFileSystem.pipe_file = put, lambda self, remote, content: write(remote, content)
        try:
            Mirror(url).put(path)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_failed_upload_is_a_warning_and_is_tried_again(memory, tmp_path, monkeypatch, caplog):
    puts, fails, failed = type(memory).put_file, [2], threading.Event()

    def put(self, local, remote, **options):  # the connection breaks between files
        if local.endswith("optimizer.pt") and fails[0]:
            fails[0] -= 1
            failed.set()
            raise ConnectionError("no route to host")
        puts(self, local, remote, **options)

    monkeypatch.setattr(type(memory), "put_file", put)
    uploads = Uploads(Mirror("memory://m"), None)
    uploads.add(checkpoint(tmp_path, 1))
    assert failed.wait(20)
    assert whole("memory://m") == []
    uploads.add(checkpoint(tmp_path, 2))
    uploads.finish()  # the second failure, then both
    assert whole("memory://m") == ["checkpoint-2", "checkpoint-1"]
    assert caplog.text.count("no route to host") == 2 and "Not uploaded" not in caplog.text
    fails[0], before = 9, len(caplog.text)
    upload("memory://m", checkpoint(tmp_path, 3))
    assert "Not uploaded to memory://m: checkpoint-3 no route to host" in caplog.text[before:]
    assert whole("memory://m") == ["checkpoint-2", "checkpoint-1"]


def test_the_end_waits_for_a_slow_upload_only_so_long(memory, tmp_path, monkeypatch, caplog):
    goes_on = threading.Event()
    monkeypatch.setattr(type(memory), "put_file", lambda *_, **__: goes_on.wait(60) and None)
    monkeypatch.setattr(mirror, "WAIT", 0.05)
    upload("memory://slow", checkpoint(tmp_path, 1))
    assert "Not uploaded to memory://slow: checkpoint-1 takes longer than 0.05 s" in caplog.text
    goes_on.set()


def test_damaged_ones_are_passed_over(place, tmp_path, caplog):
    fs, url = place
    upload(url, *(checkpoint(tmp_path / "run", step) for step in (1, 2, 3)))
    fs.rm(f"{url}/checkpoint-3/optimizer.pt")
    size = fs.size(f"{url}/checkpoint-2/optimizer.pt")
    fs.pipe(f"{url}/checkpoint-2/optimizer.pt", b"x" * size)
    lost = checkpoint(tmp_path / "lost", 1)
    (lost / "optimizer.pt").unlink()
    back = Mirror(url).fetch(tmp_path / "lost")
    assert back == lost and not faults(lost)
    assert f"checkpoint-2 in {url} is not whole: optimizer.pt" in caplog.text
    assert not (tmp_path / "lost" / ARRIVING).exists()


def test_checkpoints_of_another_run_are_not_replaced(memory, tmp_path, caplog):
    upload("memory://m", checkpoint(tmp_path / "run", 2))
    upload(
        "memory://m", make_checkpoint(tmp_path / "other", 4, **{**FACTS, "run": "other"})
    )  # began before there was one
    message = "checkpoint_mirror='memory://m' has checkpoints of another run (checkpoint-2). Give each run a mirror of its own"
    assert f"Not uploaded to memory://m: checkpoint-4 {message}" in caplog.text
    assert whole("memory://m") == ["checkpoint-2"]
    trainer = make(ROWS, folder=tmp_path / "new", save_strategy="steps", checkpoint_mirror="memory://m")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        trainer.train()


def test_a_mirror_that_cannot_be_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(ValueError, match=r"^checkpoint_mirror='xx://a' cannot be used: Protocol not known: xx.$"):
        Mirror("xx://a")
    with pytest.raises(ValueError, match=r"^checkpoint_mirror='az://a' cannot be used: Install adlfs"):
        make(ROWS, folder=tmp_path, save_strategy="steps", checkpoint_mirror="az://a").train()


def test_a_mirror_that_cannot_be_read_does_not_start_anew(memory, tmp_path, monkeypatch):
    def exists(*_, **__):
        raise PermissionError("no credentials")

    monkeypatch.setattr(type(memory), "exists", exists)
    with pytest.raises(OSError, match=r"checkpoint_mirror='memory://m' cannot be read: no credentials."):
        checkpoint_to_resume("true", tmp_path, mirror=Mirror("memory://m"))


def test_a_run_whose_folder_is_gone_ends_in_the_same_bits_and_the_same_best_checkpoint(place, tmp_path, caplog, capsys):
    settings = {
        "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True, "learning_rate": 3.0,
        "eval_strategy": "steps", "eval_steps": 1, "trainer": {"eval_dataset": Dataset.from_list(ROWS)},
    }  # fmt: skip
    plain = make(ROWS, folder=tmp_path / "plain", max_steps=4, **settings)
    plain.train()
    assert plain.state.best_global_step == 1
    url = place[1]
    settings["checkpoint_mirror"] = url
    make(ROWS, folder=tmp_path / "run", max_steps=2, **settings).train()
    both = ["checkpoint-2", "checkpoint-1"]
    assert whole(url) == [*Mirror(url).checkpoints()] == both  # save_total_limit, and the best
    assert {path.name for path in (tmp_path / "run").glob("*checkpoint-*")} == {*both}
    shutil.rmtree(tmp_path / "run")
    assert checkpoint_to_resume("true", tmp_path / "new", mirror=Mirror(f"{url}/none")) is None
    assert f"or {url}/none: starting from the beginning" in capsys.readouterr().out
    with caplog.at_level(logging.WARNING):
        resumed = make(ROWS, folder=tmp_path / "run", max_steps=4, **settings)
        resumed.train(resume_from_checkpoint=True)
    assert f"Downloading checkpoint-2 from {url}" in caplog.text and "checkpoint_mirror:" not in caplog.text
    assert whole(url) == ["checkpoint-4", "checkpoint-1"]
    for name in ("checkpoint-4", "checkpoint-1"):
        same = [(tmp_path / run / name / "model.safetensors").read_bytes() for run in ("plain", "run")]
        assert same[0] == same[1], name
    for (name, weight), other in zip(plain.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert weight.equal(other), name
