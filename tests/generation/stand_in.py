"""A server as `trl vllm-serve` is one, in which the embedded engine stands in for vLLM; and that engine without a server."""

import copy
import json
import secrets
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch

from trl.generation.engine import Sampling
from trl.generation.serving.weight_channel import WeightChannel
from trl.generation.transformers.engine import TransformersEngine
from trl.generation.vllm.backend import BackendDied, NoChannel
from trl.generation.vllm.engine import PolicyCopy

pytest.importorskip("fastapi", reason="the server of vLLM needs fastapi and uvicorn: pip install trl[test]")

from trl.generation.serving.app import GenerationServer

TOKEN = "the-secret"
OWN = ("seed", "max_tokens", "min_tokens")  # settings that requests of one call may differ in


def completed(engine, requests):
    """What an engine makes of requests as a server gets them; a request's seed names its random stream."""
    settings = [request["sampling"] for request in requests]
    (shared,) = {
        json.dumps({k: v for k, v in each.items() if k not in OWN}, sort_keys=True) for each in settings
    }
    given = json.loads(shared)
    sampling = Sampling(
        max_new_tokens=max(each["max_tokens"] for each in settings),
        temperature=given["temperature"],
        repetition_penalty=given["repetition_penalty"],
        min_new_tokens=settings[0]["min_tokens"],
        stop_token_ids=tuple(given["stop_token_ids"]),
        seed=0,
        **{name: given.get(name) for name in ("top_p", "top_k", "min_p")},
    )
    found = engine.generate(
        [request["prompt_ids"] for request in requests],
        sampling,
        streams=[each.get("seed", 0) for each in settings],
        limits=[each["max_tokens"] for each in settings],
    )
    return [
        {"ids": one.ids, "logprobs": one.logps.tolist(), "finish_reason": one.finish_reason} for one in found
    ]


class LocalCopy(PolicyCopy):
    """The embedded engine asked in the way in which a server is, about the policy as it is."""

    together = False

    def __init__(self, model, accelerator=None):
        super().__init__(model, accelerator=accelerator, context_length=None, regex=None)

    def _completed(self, own):
        return completed(TransformersEngine(self.model, accelerator=self.accelerator), own)

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

    def about(self):
        config, dtype = self.served.config, str(self.served.dtype).removeprefix("torch.")
        facts = {"model": "tiny", "dtype": dtype, "max_model_len": self.window, "device": "cpu"}
        return {**facts, "vocab_size": config.vocab_size}

    def complete(self, requests):
        self.calls.append("complete")
        return completed(self.engine, requests)

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

    thread = threading.Thread(target=serve, daemon=True)
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
        thread.join()
        server.close()
        stand_in.leave()
