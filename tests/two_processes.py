"""Programs in forks of one process that has imported the libraries: in two over gloo, or in one.

That process starts with the first program of a test run. As a program, this module is it: it reads jobs line by line, runs each
as `python -m MODULE ARGUMENT...` in its forks, and answers with their exit statuses and what they wrote.
"""

import atexit
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import pytest

from tests.fixed_costs import spare
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = dict(os.environ)  # without what a test sets
TAIL = 4000  # characters of what a process wrote
STARTED: list[subprocess.Popen] = []


class Program(NamedTuple):
    """What a process runs: `python -m module`, with additions to the environment."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = {}


def launch(
    module: str, *arguments: str, timeout: int = 400, beside: Sequence[Program] = (), processes: int = 2
) -> None:  # fmt: skip
    """Run `python -m module` in processes over gloo, and what runs `beside` them; the test fails with their errors."""
    size = str(processes)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}  # fmt: skip
    ranks = [
        Program(module, arguments, {**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in map(str, range(processes))
    ]
    statuses, written = run([*beside, *ranks], timeout)
    assert not any(statuses), f"{module} {arguments} ended with {statuses}:\n{written}"


def need_deepspeed(how: str) -> None:
    """Skip a test of ZeRO ("zero2", "zero3") where DeepSpeed is not installed."""
    if how.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install 'trl[deepspeed]'")


def ending(module: str, *arguments: str, timeout: int = 400) -> tuple[int, str]:
    """The exit status of `python -m module` in a process, as `subprocess` counts it, and what it wrote."""
    (status,), written = run([Program(module, arguments)], timeout)
    return status, written


def run(programs: Sequence[Program], timeout: int) -> tuple[list[int], str]:
    """Exit statuses of programs that run at once, and what they wrote. If one fails, the others are killed."""
    process = prepared()
    assert process.stdin is not None
    base = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = [(each.module, each.arguments, {**base, **each.environment}) for each in programs]
    process.stdin.write(json.dumps(jobs) + "\n")
    process.stdin.flush()
    statuses, written = json.loads(answer(process, timeout))
    return statuses, written


def prepared() -> subprocess.Popen:
    """The process that forks, with everything imported."""
    if STARTED and STARTED[0].poll() is None:
        return STARTED[0]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.two_processes"], cwd=ROOT, env=ENVIRONMENT, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    STARTED[:] = [process]
    answer(process, 400)
    return process


def answer(process: subprocess.Popen, timeout: int) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout)
    line = process.stdout.readline() if readable else ""
    if not line:
        stop()
        pytest.fail(f"a program gave no answer for {timeout} s")
    return line


@atexit.register
def stop() -> None:
    for process in STARTED:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    STARTED.clear()


# ---- in that process


def work() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print
    gc.disable()
    import_libraries()
    spare()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        answers.write(json.dumps(in_forks(json.loads(line))) + "\n")
        answers.flush()


def import_libraries() -> None:
    """What most programs need. Threads would not survive a fork, so nothing is computed."""
    for module in ("torch.distributed.fsdp", "tests.contracts.methods"):
        importlib.import_module(module)
    from tests.tiny import tiny_model

    for architecture in ("gpt2", "llama"):
        tiny_model(architecture)
    if importlib.util.find_spec("deepspeed") is not None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed")


def in_forks(jobs: list[tuple[str, list[str], dict[str, str]]]) -> tuple[list[int], str]:
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in jobs]
        ends = os.pipe()
        running = {fork(*job, file, ends): place for place, (job, file) in enumerate(zip(jobs, files, strict=True))}
        for end in ends:
            os.close(end)
        statuses = [0] * len(jobs)
        while running:
            child, status = os.wait()
            place = running.pop(child)
            statuses[place] = os.waitstatus_to_exitcode(status)
            if statuses[place] and running:
                time.sleep(1)  # the others write their errors
                for other in running:
                    os.kill(other, signal.SIGKILL)
        for file in files:
            file.seek(0)
        return statuses, "\n".join(file.read()[-TAIL:] for file in files)


def fork(module: str, arguments: list[str], environment: dict[str, str], file: IO[str], ends: tuple[int, int]) -> int:
    if not (child := os.fork()):
        end_with(partial(run_job, module, arguments, environment, file, ends))
    return child


def run_job(
    module: str, arguments: list[str], environment: dict[str, str], file: IO[str], ends: tuple[int, int]
) -> int:  # fmt: skip
    import torch

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    # It may wait for ever for a process that has ended.
    torch.distributed.destroy_process_group = lambda group=None: None
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    os.close(ends[1])
    select.select([ends[0]], [], [], 5)  # until the others are done too: process 0 holds the store
    return 0


def end_with(act: Callable[[], int]) -> NoReturn:
    """End this fork with the status that `act` returns or exits with; 1 for an error, which is printed."""
    status = 1
    try:
        status = act()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of torch and gloo that still wait when the interpreter exits abort it now and then on a busy machine
        # ("terminate called without an active exception"), after all work is done.
        os._exit(status)


if __name__ == "__main__":
    work()
