"""What vLLM's workers inherit, with a stand-in for the worker and its model."""

import os
import signal
import subprocess
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.ports import free_port
from trl.generation.serving.weight_channel import WeightChannel
from trl.generation.vllm.worker import WeightReceiver, WeightSyncWorkerExtension


class Model:
    def __init__(self):
        self.loaded = {}
        self.stops_after, self.is_silent = None, False

    def load_weights(self, weights):
        for index, (name, tensor) in enumerate(weights):
            if name == "bad":
                raise KeyError(name)
            self.loaded[name] = tensor.clone()
            if index == self.stops_after:
                break
        return None if self.is_silent else set(self.loaded)

    def named_parameters(self):
        return [("a", None), ("qkv", None)]


class Worker(WeightReceiver):
    rank, device = 0, torch.device("cpu")

    def __init__(self):
        self.model, self.reloads, self.ended = Model(), 0, 0
        self.model_runner = self
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator):
        self.reloads += 1
        self.model.load_weights(weights_iterator)

    def _end_reload(self):
        self.ended += 1


@contextmanager
def joined():
    port = free_port()
    worker, said = Worker(), []
    join = threading.Thread(target=lambda: said.append(worker.join_weight_channel("127.0.0.1", port, 2, "gloo", 10.0)))
    join.start()
    sender = WeightChannel.join("127.0.0.1", port, 0, 2, backend="gloo", timeout_s=10)
    join.join()
    assert said == [None] and worker.weight_channel is not None
    yield worker, sender
    worker.leave_weight_channel()
    sender.close()


def sent(worker, sender, weights, whole):
    """What the worker said of these weights, and what the sender ran into."""
    said, entries = (
        [],
        [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in weights.items()],
    )
    receive = threading.Thread(target=lambda: said.append(worker.receive_weights(entries, whole)))
    receive.start()
    try:
        sender.send(weights.values())
        broken = None
    except ConnectionError as error:
        broken = str(error)
    receive.join()
    return said[0], broken


WEIGHTS = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.arange(3)}


def test_weights_are_loaded_as_they_were_sent():
    with joined() as (worker, sender):
        assert sent(worker, sender, WEIGHTS, whole=True) == (None, None)
        torch.testing.assert_close(worker.model.loaded, WEIGHTS, rtol=0, atol=0)
        one = {"b": torch.ones(5)}
        assert sent(worker, sender, one, whole=False) == (None, None)
        torch.testing.assert_close(worker.model.loaded, WEIGHTS | one, rtol=0, atol=0)
        assert worker.reloads == 1  # a single weight goes into the model as it stands


def test_a_failure_is_told_and_the_channel_left():
    bad = {"bad": torch.ones(2, 2), "large": torch.zeros(20_000_000)}  # which the sender cannot get rid of
    with joined() as (worker, sender):
        said, broken = sent(worker, sender, bad, whole=True)
        assert said == "loading bad (float32, [2, 2]) failed with KeyError: 'bad'"
        assert broken is not None and "The weight channel broke" in broken
        assert worker.weight_channel is None and worker.ended == 1
        assert worker.receive_weights([], True) == "no weight channel has been joined. Call init_communicator first."


def test_the_engine_ends_with_its_server(monkeypatch):
    server, told = subprocess.Popen(["cat"], stdin=subprocess.PIPE), threading.Event()
    sent = []
    monkeypatch.setattr(os, "kill", lambda *what: (sent.append(what), told.set()))
    monkeypatch.setattr(os, "getppid", lambda: 77)  # the engine, of which this process is a worker
    Worker().end_with(server.pid)
    assert not told.wait(0.2)
    server.communicate()
    assert told.wait(10) and sent[-1] == (77, signal.SIGTERM)
    monkeypatch.setattr(os, "getppid", lambda: other.pid)
    other = subprocess.Popen(["true"])
    told.clear()
    Worker().end_with(other.pid)  # whose child this process then is: the engine itself
    assert told.wait(10) and sent[-1] == (os.getpid(), signal.SIGTERM)
    other.wait()


def test_the_extension_of_a_programs_own_vllm():
    """The methods that 0.26 names: what fails is raised."""
    worker = type("Own", (WeightSyncWorkerExtension, Worker), {})()
    with pytest.raises(RuntimeError, match="no weight channel has been joined"):
        worker.update_named_param("a", "float32", (2,))
    port = free_port()
    join = threading.Thread(target=worker.init_communicator, args=("127.0.0.1", port, 2, "no-uuid"))
    join.start()
    sender = WeightChannel.join("127.0.0.1", port, 0, 2, backend="gloo", timeout_s=10)
    join.join()
    assert worker.communicator is worker.weight_channel is not None and worker.client_rank == 0
    update = threading.Thread(target=worker.update_named_param, args=("a", "torch.float32", (2,)))
    update.start()
    sender.send([torch.tensor([1.0, 2.0])])
    update.join()
    assert worker.model.loaded["a"].tolist() == [1.0, 2.0]
    worker.close_communicator()
    sender.close()
    assert worker.communicator is None and worker.client_rank is None
