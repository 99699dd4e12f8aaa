"""Programs in forks of one process that has imported the libraries: in two over gloo, or in one.

That process is a fork itself, of the process of the tests before its first test, when it has imported everything and computed
nothing. It reads jobs line by line, runs each as `python -m MODULE ARGUMENT...` in its forks, and answers with their exit
statuses and what they wrote.
"""

import atexit
import importlib.util
import json
import os
import runpy
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import pytest

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
TAIL = 4000  # characters of what a process wrote


class Process(NamedTuple):
    """The process that forks, and the pipes to and from it."""

    id: int
    jobs: IO[str]
    answers: IO[str]


STARTED: list[Process] = []


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
    base = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = [(each.module, each.arguments, {**base, **each.environment}) for each in programs]
    print(json.dumps(jobs), file=process.jobs, flush=True)
    statuses, written = json.loads(answer(process, timeout))
    return statuses, written


def prepared() -> Process:
    """The process that forks, with everything imported."""
    if not STARTED:
        (jobs, to_jobs), (answers, to_answers) = os.pipe(), os.pipe()
        if not (process := os.fork()):
            os.close(to_jobs)  # the tests' process has the only one: when it ends, so do the jobs
            end_with(partial(work, jobs, to_answers))
        os.close(jobs)
        os.close(to_answers)
        STARTED.append(Process(process, os.fdopen(to_jobs, "w"), os.fdopen(answers)))
    return STARTED[0]


def answer(process: Process, timeout: int) -> str:
    readable, _, _ = select.select([process.answers], [], [], timeout)
    line = process.answers.readline() if readable else ""
    if not line:
        stop()
        pytest.fail(f"a program gave no answer for {timeout} s")
    return line


@atexit.register
def stop() -> None:
    for process in STARTED:
        process.jobs.close()
        process.answers.close()
        with suppress(ProcessLookupError):  # it may have ended, or not begun
            os.killpg(process.id, signal.SIGKILL)
        os.waitpid(process.id, 0)
    STARTED.clear()


# ---- in that process


def work(jobs: int, answers: int) -> int:
    """In a session of its own, without pytest's output, imports and hooks."""
    os.setsid()
    for file in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), file)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    os.chdir(ROOT)
    import_libraries()
    with os.fdopen(jobs) as lines, os.fdopen(answers, "w") as answered:
        for line in lines:
            print(json.dumps(in_forks(json.loads(line))), file=answered, flush=True)
    return 0


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
    sys.modules.pop(module, None)
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
