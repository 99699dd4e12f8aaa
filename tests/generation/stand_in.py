"""A server as `trl vllm-serve` is one, in which the embedded engine stands in for vLLM; and that engine without a server."""

import copy
import secrets
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch

from trl.generation.engine import Sampling
from trl.generation.live import Broker, Request
from trl.generation.serving.weight_channel import WeightChannel
from trl.generation.transformers.engine import TransformersEngine
from trl.generation.vllm.backend import BackendDied, NoChannel
from trl.generation.vllm.engine import PolicyCopy

pytest.importorskip("fastapi", reason="the server of vLLM needs fastapi and uvicorn: pip install 'trl[test]'")

from trl.generation.serving.app import GenerationServer

TOKEN = "the-secret"


def request_of(given):
    """A request as a server gets it, for the embedded engine; its seed names its random stream."""
    own = given["sampling"]
    sampling = Sampling(
        max_new_tokens=own["max_tokens"],
        temperature=own["temperature"],
        repetition_penalty=own["repetition_penalty"],
        min_new_tokens=own["min_tokens"],
        stop_token_ids=tuple(own["stop_token_ids"]),
        seed=0,
        **{name: own.get(name) for name in ("top_p", "top_k", "min_p")},
    )
    return Request(given["prompt_ids"], sampling, stream=own.get("seed", 0))


class EngineSteps:
    """What `Steps` is, by the embedded engine with its present weights."""

    def __init__(self, engine):
        self.engine, self.context, self.live = engine, None, None

    def submit(self, request):
        if self.live is None:
            self.context = self.engine.live()
            self.live = self.context.__enter__()
        return self.live.submit(request_of(request))

    def cancel(self, number):
        self.live.cancel(number)

    def step(self):
        found = {
            number: {"ids": one.ids, "logprobs": one.logps.tolist(), "finish_reason": one.finish_reason}
            for number, one in self.live.step().items()
        }
        if not self.live.busy:
            self.context.__exit__(None, None, None)
            self.live = None
        return found


class LocalCopy(PolicyCopy):
    """The embedded engine asked in the way in which a server is, about the policy as it is."""

    together = False

    def __init__(self, model, accelerator=None):
        super().__init__(model, accelerator=accelerator, context_length=None, regex=None)

    def _completed(self, own):
        steps, found = EngineSteps(TransformersEngine(self.model, accelerator=self.accelerator)), {}
        numbers = [steps.submit(request) for request in own]
        while steps.live is not None:
            found |= steps.step()
        return [found[number] for number in numbers]

    def _send(self, parts):
        return None

    def close(self):
        return None


class StandIn:
    """What a server asks of `VLLMBackend`, answered by a model in this process; `calls` is what was asked for."""

    world_size = 1

    def __init__(self, model, window=None):
        self.served = copy.deepcopy(model)
        self.engine = TransformersEngine(self.served)
        self.window = window or model.config.max_position_embeddings
        self.channel, self.calls, self.received = None, [], []
        self._receiving, self.dead = None, None
        self.steps, self.broker, self.ended = EngineSteps(self.engine), Broker(), False

    def run(self):
        """Run the steps until the server ends."""
        self.broker.run(self.steps, lambda: self.ended)

    def about(self):
        config, dtype = self.served.config, str(self.served.dtype).removeprefix("torch.")
        facts = {"model": "tiny", "dtype": dtype, "max_model_len": self.window, "device": "cpu"}
        return {**facts, "vocab_size": config.vocab_size}

    def submit(self, request):
        self.calls.append("complete")
        return self.broker.submit(request)

    def generate(self, asked):
        return {"asked": asked.model_dump()}

    chat = generate

    def join(self, *, host, port, size, backend, timeout_s):
        self.leave()
        how = {"backend": backend, "timeout_s": timeout_s, "serves_store": True}
        self._receiving = WeightChannel.join(host, port, 1, size, **how)
        self.calls.append("join")
        self.channel = secrets.token_hex(4)

    def check(self):
        if self.dead is not None:
            raise BackendDied(self.dead)

    def load(self, weights, *, whole):
        self.broker.call(lambda steps: self._load(weights), alone=True).result()

    def _load(self, weights):
        if self._receiving is None:
            raise NoChannel("no channel")
        self._receiving.announce()
        own = dict(self.served.named_parameters(remove_duplicate=False)) | dict(self.served.named_buffers())
        entries = [(getattr(torch, each.dtype), each.shape) for each in weights]
        try:
            with torch.no_grad():
                for each, tensor in zip(weights, self._receiving.receive(entries), strict=True):
                    own[each.name].copy_(tensor)
        except (KeyError, ConnectionError):
            self.leave()
            raise
        self.calls.append("load")
        self.received.append({each.name for each in weights})

    def leave(self, channel=None):
        if channel not in (None, self.channel):
            return
        receiving, self._receiving, self.channel = self._receiving, None, None
        if receiving is not None:
            receiving.close()

    def reset_prefix_cache(self):
        self.calls.append("reset")


@contextmanager
def serving(stand_in, port=0):
    """The address of a server of this stand-in, on a port of this machine."""
    server = GenerationServer("127.0.0.1", port)

    def serve():
        with suppress(BackendDied):
            server.serve(stand_in, token=TOKEN)

    threads = [threading.Thread(target=each, daemon=True) for each in (serve, stand_in.run)]
    for thread in threads:
        thread.start()
    while True:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
            break
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        stand_in.ended = True
        stand_in.broker.wake()
        for thread in threads:
            thread.join()
        server.close()
        stand_in.leave()
