"""Programs in two processes over gloo: in one pool that all tests share, or in processes of their own.

The pool starts once in a test run. As a program, this module is one of its processes: it reads jobs `[MODULE, ARGUMENT...]`
line by line, runs each as `python -m MODULE ARGUMENT...`, and answers with the error's traceback or nothing.
"""

import atexit
import gc
import json
import os
import queue
import runpy
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STARTED: list[tuple[subprocess.Popen, queue.Queue]] = []


def launch(module: str, *arguments: str, timeout: int = 400, own: bool = False) -> None:
    """Run `python -m module` in two processes over gloo; the test fails with their errors.

    Those of the pool, unless the program needs its `own`: one that changes the libraries for good or keeps groups open.
    """
    if own:
        return launch_own(module, *arguments, timeout=timeout)
    if any(process.poll() is not None for process, _ in STARTED):
        stop_pool()
    if not STARTED:
        start_pool()
    for process, _ in STARTED:
        assert process.stdin is not None
        process.stdin.write(json.dumps([module, *arguments]) + "\n")
        process.stdin.flush()
    try:
        errors = [json.loads(answers.get(timeout=timeout)) for _, answers in STARTED]
    except (queue.Empty, json.JSONDecodeError):
        errors = [f"a process ended, or gave no answer for {timeout} s"]
    if any(errors):
        stop_pool()  # the other process may wait for this one
        pytest.fail(f"{module} {arguments}: " + "\n".join(error[-4000:] for error in errors if error))
    return None


def launch_own(module: str, *arguments: str, timeout: int) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "-m", "tests.two_processes", module, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        started.terminate()  # torchrun ends its processes with it; killed, it would leave them behind
        _, errors = started.communicate()
        pytest.fail(f"{module} {arguments} took over {timeout} s:\n{errors[-4000:]}")
    assert started.returncode == 0, errors[-4000:]


def start_pool() -> None:
    from accelerate.utils.other import get_free_port

    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    for rank in ("0", "1"):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.two_processes"], cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"},
        )  # fmt: skip
        answers: queue.Queue[str] = queue.Queue()

        def read(process: subprocess.Popen = process, answers: queue.Queue = answers) -> None:
            for line in process.stdout or ():
                answers.put(line)
            answers.put("")

        threading.Thread(target=read, daemon=True).start()
        STARTED.append((process, answers))


@atexit.register
def stop_pool() -> None:
    for process, _ in STARTED:
        process.kill()
    STARTED.clear()


def work() -> None:
    """Run the jobs of the pool in this process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print
    import torch
    from accelerate.state import AcceleratorState, GradientState

    environment = dict(os.environ)
    torch.distributed.destroy_process_group = lambda group=None: None  # the group is that of the pool
    for line in sys.stdin:
        module, *sys.argv[1:] = json.loads(line)
        error = ""
        try:
            torch.manual_seed(0)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except BaseException:
            error = traceback.format_exc()
        gc.collect()
        gc.freeze()  # as in conftest.py: what was imported is not collected again
        os.environ.clear()
        os.environ.update(environment)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        answers.write(json.dumps(error) + "\n")
        answers.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        work()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch and gloo that still wait when the interpreter exits abort it now and then on a busy machine
    # ("terminate called without an active exception"), after all work is done.
    os._exit(0)
