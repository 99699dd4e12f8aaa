"""SIGTERM to a process of `trl sft`: exit status 143, with the way to resume."""

import json
import os
import signal
import time

import pytest

from tests.forked import fork, trl
from tests.models.words import word_tokenizer
from tests.tiny import tiny_model
from trl.checkpoints.ownership import PREFIX
from trl.checkpoints.wholeness import newest_whole
from trl.scripts.running import Terminated, sigterm_raises


@pytest.mark.slow
def test_a_terminated_run_says_how_it_resumes(tmp_path):
    """With a checkpoint made for the signal."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    word_tokenizer(eos_token="</s>", pad_token="<pad>", bos_token="<s>").save_pretrained(tmp_path / "model")
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text((json.dumps({"prompt": "the cat ", "completion": "sat on the mat"}) + "\n") * 4)
    settings = {
        "model_name_or_path": tmp_path / "model", "dataset_name": data, "output_dir": out, "max_steps": 10**6,
        "report_to": "none", "use_cpu": "true", "disable_tqdm": "true", "save_total_limit": 2, "logging_steps": 10**6,
        "enable_jit_checkpoint": "true", "save_strategy": "no",
    }  # fmt: skip
    words = ["sft", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]
    with open(os.devnull, "r+") as nothing, (tmp_path / "errors").open("w") as file:
        child = fork(lambda: trl(words), nothing.fileno(), nothing.fileno(), file.fileno())
    until = time.monotonic() + 240
    while not list(out.glob(f"{PREFIX}*")) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(child, signal.SIGTERM)
    status, errors = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (tmp_path / "errors").read_text()
    assert status == 143, errors
    assert "Traceback" not in errors
    assert not list(out.glob(f"{PREFIX}*")) and not (out / "model.safetensors").exists()
    assert f"newest checkpoint {newest_whole(out)}" in errors
    assert "To resume: trl sft with the same options and --resume_from_checkpoint true" in errors


def test_sigterm_is_an_exception_within_a_command():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as stop, sigterm_raises():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert stop.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_fork_of_a_command_ends_at_once():
    read, write = os.pipe()
    with sigterm_raises():
        child = os.fork()
        if child == 0:
            try:
                os.write(write, b"x")  # Python drops signals that arrive before a fork is set up
                time.sleep(60)
            finally:
                os._exit(1)
        os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.close(read)
    os.close(write)
