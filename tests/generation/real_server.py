"""The real `trl vllm-serve` in a process of its own, on a tiny model, asked over plain HTTP."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.generation.vllm_runs import model
from tests.ports import free_port
from tests.trainer.resume_worker import tokenizer
from trl.generation.serving.connection import VARIABLE
from trl.generation.serving.weight_channel import WeightChannel

SMALL = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
SHARED_MEMORY = Path("/dev/shm")


def saved(folder: Path) -> Path:
    """The tiny model and its tokenizer, as a checkpoint."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class RealServer:
    """`trl vllm-serve` with these options; `stop` ends it with a signal to the process alone, or as Ctrl-C to all of its group."""

    def __init__(self, checkpoint: Path, cache: Path, *options: str) -> None:
        self.port, self.cache, self.memory = free_port(), cache, set(SHARED_MEMORY.iterdir())
        command = [
            sys.executable,
            "-m",
            "trl.cli",
            "vllm-serve",
            "--model",
            str(checkpoint),
            "--port",
            str(self.port),
        ]
        command += ["--dtype", "float32", "--enforce_eager", "--log_level", "warning", *options]
        self.log = cache / f"{self.port}.log"
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self.process = subprocess.Popen(
            command, env=environment | SMALL | {"XDG_CACHE_HOME": str(cache)}, start_new_session=True,
            stdout=self.log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    @property
    def token_file(self) -> Path:
        return self.cache / "trl" / f"vllm-serve-{self.port}.token"

    def wait(self, seconds: float = 300) -> None:
        """Until it answers."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                assert self.ask("/health/") == (200, {"status": "ok"})
                return
            except OSError:
                time.sleep(0.3)
        raise TimeoutError(self.log.read_text()[-3000:])

    def ask(self, path: str, body: dict | None = None) -> tuple[int, dict]:
        headers = {"Authorization": f"Bearer {self.token_file.read_text()}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def meanwhile(self, path: str, body: dict) -> "Asking":
        """The same in a thread."""
        asking = Asking(self, path, body)
        asking.start()
        return asking

    def join(self, workers: int = 1) -> WeightChannel:
        """The sending end of a channel with its workers."""
        port = free_port()
        body = {
            "host": "127.0.0.1",
            "port": port,
            "world_size": workers + 1,
            "backend": "gloo",
            "timeout_s": 60,
        }
        asking = self.meanwhile("/init_communicator/", body)
        channel = WeightChannel.join("127.0.0.1", port, 0, workers + 1, backend="gloo", timeout_s=60)
        status, answer = asking.answer()
        assert status == 200 and answer["channel"] == self.ask("/model/")[1]["channel"]
        return channel

    def send(self, channel: WeightChannel, weights: dict) -> tuple[int, dict]:
        """What it says to these weights."""
        asking = self.meanwhile("/update_weights/", {"weights": described(weights)})
        try:
            channel.send(weights.values())
        except ConnectionError:
            channel.close()
        return asking.answer()

    def stop(self, number: int, *, group: bool = False) -> int:
        """Its exit status, once nothing of it is left."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            os.kill(self.process.pid, number)
        status = self.process.wait(timeout=120)
        until = time.monotonic() + 20
        while (left := alive(self.process.pid)) and time.monotonic() < until:
            time.sleep(0.2)
        assert left == [], left
        assert not self.token_file.exists()
        assert abandoned(set(SHARED_MEMORY.iterdir()) - self.memory) == set()
        return status

    def kill(self) -> None:
        """End it and its workers whatever state they are in, after a test that failed."""
        if alive(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)


class Asking(threading.Thread):
    """A question asked meanwhile."""

    def __init__(self, server: RealServer, path: str, body: dict) -> None:
        super().__init__(daemon=True)
        self.question, self.found = (server, path, body), (0, {})

    def run(self) -> None:
        server, path, body = self.question
        self.found = server.ask(path, body)

    def answer(self) -> tuple[int, dict]:
        self.join(120)
        return self.found


def described(weights: dict) -> list[dict]:
    return [
        {"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        for name, value in weights.items()
    ]


def alive(session: int) -> list[str]:
    """The processes of a session that run; those that only wait to be collected do not count."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(f"{folder.name} {(folder / 'comm').read_text().strip()}")
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return found


def abandoned(files: set[Path]) -> set[Path]:
    """Those files of shared memory that no process of this machine uses: other programs may run beside a test."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            used += maps.read_text()
    return {file for file in files if str(file) not in used and file.exists()}
