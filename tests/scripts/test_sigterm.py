"""SIGTERM to a real `trl sft` process: exit status 143, with the way to resume."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.models.words import word_tokenizer
from tests.tiny import tiny_model
from trl.checkpoints.ownership import PREFIX
from trl.checkpoints.wholeness import newest_whole
from trl.scripts.running import Terminated, sigterm_raises

TRL = [sys.executable, "-c", "import sys; from trl.cli import main; sys.exit(main())"]


@pytest.fixture
def command(tmp_path):
    """`trl sft` for more steps than anybody waits for."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    word_tokenizer(eos_token="</s>", pad_token="<pad>", bos_token="<s>").save_pretrained(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text((json.dumps({"prompt": "the cat ", "completion": "sat on the mat"}) + "\n") * 4)
    settings = {
        "model_name_or_path": tmp_path / "model", "dataset_name": data, "output_dir": tmp_path / "out", "max_steps": 10**6,
        "report_to": "none", "use_cpu": "true", "disable_tqdm": "true", "save_total_limit": 2, "logging_steps": 10**6,
    }  # fmt: skip
    return [*TRL, "sft", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


def terminated(command, begun):
    """The exit status and the error output of a command that gets SIGTERM once something has `begun`."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 240
        while not begun() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    return process.returncode, errors


@pytest.mark.slow
@pytest.mark.parametrize("line", [["--enable_jit_checkpoint", "true", "--save_strategy", "no"]])
def test_a_terminated_run_says_how_it_resumes(line, command, tmp_path):
    """With a checkpoint made for the signal, or with the last one that was saved anyway."""
    out = tmp_path / "out"
    on_signal = "--enable_jit_checkpoint" in line
    begun = (lambda: list(out.glob(f"{PREFIX}*"))) if on_signal else (lambda: newest_whole(out))
    status, errors = terminated([*command, *line], begun)
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
                for _ in range(3000):  # one that arrives just before a sleep is handled after it
                    time.sleep(0.02)
            finally:
                os._exit(1)
        os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.close(read)
    os.close(write)
