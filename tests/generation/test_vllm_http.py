"""The HTTP side of `trl vllm-serve` over loopback, with a backend that records what it is asked."""

import http.client
import json
import socket
import threading
from concurrent.futures import Future
from contextlib import closing

import pytest

from trl.generation.vllm.backend import BackendDied, NoChannel

pytest.importorskip("fastapi", reason="the server of vLLM needs fastapi and uvicorn: pip install 'trl[test]'")

from trl.generation.serving.app import GenerateBody, GenerationServer

TOKEN = "secret"
GETS = ("/health/", "/get_world_size/", "/model/")
POSTS = (
    "/complete/", "/generate/", "/chat/", "/init_communicator/", "/update_weights/", "/update_named_param/", "/reset_prefix_cache/",
    "/close_communicator/",
)  # fmt: skip
PATHS = [*(("GET", path) for path in GETS), *(("POST", path) for path in POSTS)]


class Recorder:
    """Says what it was asked; `raises` is raised instead, once."""

    world_size = 2

    def __init__(self):
        self.calls, self.raises, self.channel, self.dead = [], None, None, False
        self.answer = {"ids": [1], "logprobs": [-0.5], "finish_reason": "stop"}

    def _called(self, *call):
        self.calls.append(call)
        error, self.raises = self.raises, None
        if error is not None:
            raise error

    def about(self):
        return {"model": "m", "dtype": "bfloat16", "max_model_len": 32, "vocab_size": 99, "device": "cpu"}

    def submit(self, request):
        self._called("complete", [request])
        future = Future()
        future.set_result(self.answer)
        return future

    def generate(self, asked):
        self._called("generate", asked)
        return {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[-1.0]]}

    def chat(self, asked):
        self._called("chat", asked)
        return {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[-1.0]]}

    def join(self, **where):
        self._called("join", where)
        self.channel = "c1"

    def load(self, weights, *, whole):
        self._called("load", [(one.name, one.dtype, one.shape) for one in weights], whole)
        return ["v"] if whole else []

    def check(self):
        if self.dead:
            raise BackendDied("the engine is gone")

    def leave(self, channel=None):
        self._called("leave", channel)
        self.channel = None

    def reset_prefix_cache(self):
        self._called("reset")


class Served:
    def __init__(self):
        self.backend, self.ended = Recorder(), []
        self.server = GenerationServer("127.0.0.1", 0)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        try:
            self.server.serve(self.backend, token=TOKEN, max_body_bytes=10_000)
        except BackendDied as died:
            self.ended.append(str(died))

    def ask(self, method, path, body=None, *, token=TOKEN, headers=None):
        """Status and answer; `body` is an object, or bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = (
            {"Content-Type": "application/x-www-form-urlencoded"}
            | ({"Authorization": f"Bearer {token}"} if token else {})
            | (headers or {})
        )
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


def started():
    made, wait = Served(), threading.Event()
    while True:
        try:
            made.ask("GET", "/health/")
            return made
        except ConnectionRefusedError:  # the thread has not come to listen yet
            wait.wait(0.02)


def ended(made):
    made.server.shutdown()
    made.thread.join()
    made.server.close()


@pytest.fixture(scope="module")
def shared():
    made = started()
    yield made
    ended(made)


@pytest.fixture
def served(shared):
    vars(shared.backend).update(vars(Recorder()))
    return shared


SETTINGS = {"temperature": 0.5, "max_tokens": 3}


def test_every_route_reaches_the_backend(served):
    weight = {"name": "w", "dtype": "bfloat16", "shape": [2, 3]}
    join = {"host": "ignored", "port": 51216, "world_size": 3, "backend": "gloo", "timeout_s": 5}
    requests = [{"prompt_ids": [1, 2], "sampling": SETTINGS}]
    lists = {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[-1.0]]}
    about = served.backend.about()
    assert served.ask("GET", "/health/") == (200, {"status": "ok"})
    assert served.ask("GET", "/get_world_size/") == (200, {"world_size": 2})
    assert served.ask("GET", "/model/") == (200, about | {"channel": None})
    assert served.ask("POST", "/init_communicator/", join) == (200, {"status": "joined", "channel": "c1"})
    assert served.ask("GET", "/model") == (200, about | {"channel": "c1"})
    completion = {"ids": [1], "logprobs": [-0.5], "finish_reason": "stop"}
    assert served.ask("POST", "/complete/", {"requests": requests}) == (
        200,
        {"completions": [completion], "channel": "c1"},
    )
    assert served.ask("POST", "/generate/", {"prompts": ["a", [1, 2]], "images": [None, "x"], "n": 2}) == (
        200,
        lists,
    )
    messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "image": "QUJD"}]}]
    assert served.ask("POST", "/chat/", {"messages": [messages], "tools": [{}], "top_p": 1}) == (200, lists)
    assert served.ask("POST", "/update_weights/", {"weights": [weight, weight]}) == (200, {"loaded": 2})
    assert served.ask("POST", "/update_named_param/", weight) == (200, {"loaded": 1})
    assert served.ask("POST", "/reset_prefix_cache/", {}) == (200, {"status": "ok"})
    assert served.ask("POST", "/close_communicator/", {"channel": "c1"}) == (200, {"status": "ok"})

    calls = {call[0]: call[1:] for call in served.backend.calls}
    assert calls["join"] == ({"host": "127.0.0.1", "port": 51216, "size": 3, "backend": "gloo", "timeout_s": 5},)
    assert calls["complete"] == (requests,)
    generated = calls["generate"][0]
    assert generated.model_dump() == {
        "n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 16,
        "truncate_prompt_tokens": None, "guided_decoding_regex": None, "generation_kwargs": None, "prompts": ["a", [1, 2]],
        "images": [None, "x"],
    }  # fmt: skip
    assert [generated.images_of(index) for index in range(2)] == [[], ["x"]]
    (asked,) = calls["chat"]
    assert asked.top_p == 1 and asked.tools == [{}]
    assert asked.messages[0][0]["content"] == [
        {"type": "text", "text": "?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
    ]
    assert [call[1:] for call in served.backend.calls if call[0] == "load"] == [
        ([("w", "bfloat16", [2, 3])] * 2, True),
        ([("w", "bfloat16", [2, 3])], False),
    ]
    assert served.backend.calls[-2:] == [("reset",), ("leave", "c1")]
    served.ask("POST", "/close_communicator/", b"")
    assert served.backend.calls[-1] == ("leave", None)


def test_sampling_arguments_of_prompts():
    body = {
        "prompts": ["a"],
        "guided_decoding_regex": "[0-9]",
        "generation_kwargs": {"seed": 3, "top_k": 5},
        "max_tokens": 7,
    }
    assert GenerateBody(**body).sampling() == {
        "n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "max_tokens": 7,
        "structured_outputs": {"regex": "[0-9]"}, "seed": 3,
    }  # fmt: skip


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", "sécret"])
def test_all_but_health_needs_the_token(served, token):
    sent = None if token is None else token.encode()
    headers = {} if sent is None else {"Authorization": b"Bearer " + sent}
    for method, path in PATHS:
        status, answer = served.ask(method, path, {} if method == "POST" else None, token=None, headers=headers)
        assert status == (200 if path == "/health/" else 401), path
        assert path == "/health/" or "TRL_VLLM_SERVER_TOKEN" in answer["error"]
    assert served.backend.calls == []


BAD = [
    ("/complete/", b"{", "JSON"),
    ("/complete/", {}, "requests: Field required"),
    ("/complete/", {"requests": [{"prompt_ids": []}]}, "requests.0.prompt_ids"),
    ("/complete/", {"requests": [{"prompt_ids": [1, True]}]}, "requests.0.prompt_ids.1"),
    ("/complete/", {"requests": [{"prompt_ids": [1], "n": 2}]}, "requests.0.n: Extra"),
    ("/complete/", {"requests": [{"prompt_ids": [1], "sampling": {"n": 2}}]}, "requests.0.sampling: Value error, n must be 1"),
    ("/generate/", {"prompts": ["a"], "temperatur": 1}, "temperatur: Extra"),
    ("/generate/", {"prompts": ["a"], "n": "2"}, "n: Input should be a valid integer"),
    ("/generate/", {"prompts": ["a", {}]}, "prompts.1"),
    ("/generate/", {"prompts": ["a"], "images": []}, "images must be one per prompt"),
    ("/chat/", {"messages": ["hello"]}, "messages.0"),
    ("/chat/", {"messages": [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}]]}, "must be text, or images as base64 or data URLs"),
    ("/init_communicator/", {"port": 51216, "world_size": 2, "backend": "gloo"}, "world_size must be 3"),
    ("/init_communicator/", {"port": 51216, "world_size": 3, "backend": "mpi"}, "backend: "),
    ("/update_weights/", {"weights": [{"name": "w", "dtype": "floaty", "shape": []}]}, "weights.0.dtype"),
    ("/update_named_param/", {"name": "w", "dtype": "float32", "shape": [-1]}, "shape.0"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "said"), BAD)
def test_bad_input_is_400_and_says_why(served, path, body, said):
    status, answer = served.ask("POST", path, body)
    assert status == 400 and said in answer["error"]
    if path.startswith("/update"):  # else the client would wait for this server to receive
        assert [call[0] for call in served.backend.calls] == ["leave"]
    else:
        assert served.backend.calls == []


def test_errors_of_the_backend(served):
    requests = {"requests": [{"prompt_ids": [1]}]}
    served.backend.raises = ValueError("too long")
    assert served.ask("POST", "/complete/", requests) == (400, {"error": "too long"})
    served.backend.raises = RuntimeError("out of memory")
    assert served.ask("POST", "/complete/", requests) == (500, {"error": "RuntimeError: out of memory"})
    served.backend.raises = NoChannel("no channel")
    assert served.ask("POST", "/update_weights/", {"weights": []}) == (409, {"error": "no channel"})
    assert served.ask("POST", "/complete/", requests)[0] == 200


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_log_probs_that_are_no_numbers_are_500_and_no_json_of_their_own(served, value):
    served.backend.answer = {"ids": [1], "logprobs": [-0.5, value]}
    status, answer = served.ask("POST", "/complete/", {"requests": [{"prompt_ids": [1]}]})
    assert status == 500 and "not finite" in answer["error"]


def test_the_server_ends_with_what_generates():
    made = started()
    made.backend.raises = BackendDied("the engine is gone")
    answer = made.ask("POST", "/complete/", {"requests": [{"prompt_ids": [1]}]})
    assert answer == (503, {"error": "the engine is gone"})
    made.thread.join(10)
    assert made.ended == ["the engine is gone"]
    made.server.close()


def test_an_engine_that_died_while_idle_is_not_healthy():
    made = started()
    made.backend.dead = True
    assert made.ask("GET", "/health/", token=None) == (503, {"error": "the engine is gone"})
    made.thread.join(10)
    assert made.ended == ["the engine is gone"]
    made.server.close()


def test_a_body_that_is_too_long_is_413(served):
    body = {"requests": [{"prompt_ids": [1] * 7000}]}  # 21 kB
    status, answer = served.ask("POST", "/complete/", body)
    assert status == 413 and "more than 10000 bytes" in answer["error"]
    assert served.ask("POST", "/complete/", body, token="wrong")[0] == 401


def test_the_address_is_taken_before_there_is_a_model():
    server = GenerationServer("127.0.0.1", 0)
    with closing(server), pytest.raises(ConnectionRefusedError):  # bound, and not listening yet
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        GenerationServer("127.0.0.1", taken.getsockname()[1])
