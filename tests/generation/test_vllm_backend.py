"""What `trl vllm-serve` asks of vLLM, with a stand-in for it."""

import os
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.generation.test_vllm_engine import Settings, Steps
from trl.generation.serving.app import BackendDied, ChatBody, GenerateBody, NoChannel, WeightBody
from trl.generation.vllm import backend as vllm_backend
from trl.generation.vllm.backend import WORKER, ServedModel, VLLMBackend


class ClientError(Exception):
    """What vLLM raises for what it was asked."""


class Dead(Exception):
    """What vLLM raises without its engine."""


class LLM:
    """Says what it was asked, and answers each prompt with its first token, twice where n is 2."""

    def __init__(self, **settings):
        self.settings, self.calls, self.worker_says, self.raises = settings, [], None, None
        self.model_config = SimpleNamespace(dtype=torch.bfloat16, max_model_len=32, get_vocab_size=lambda: 99)
        self.resources = SimpleNamespace(engine_dead=False)
        self.llm_engine = Steps()
        self.llm_engine.engine_core = SimpleNamespace(shutdown=self._shutdown, resources=self.resources)

    def _shutdown(self, timeout):
        self.calls.append(("shutdown", timeout))

    def generate(self, prompts, settings, use_tqdm, **others):
        self.calls.append(("generate", prompts, settings, others))
        if self.raises is not None:
            raise self.raises
        each = settings if isinstance(settings, list) else [settings] * len(prompts)
        return [
            answer(prompt.get("prompt_token_ids", [7]), one.get("n", 1))
            for prompt, one in zip(prompts, each, strict=True)
        ]

    def chat(self, conversations, settings, use_tqdm, **others):
        self.calls.append(("chat", conversations, settings, others))
        return [answer([3], settings["n"]) for _ in conversations]

    def collective_rpc(self, name, args=()):
        self.calls.append((name, *args))
        if name == "shared_memory_name":
            return ["shm-1", None]
        return [None, self.worker_says]

    def reset_prefix_cache(self):
        self.calls.append(("reset",))


def answer(ids, n):
    one = SimpleNamespace(token_ids=ids[:1], logprobs=[{ids[0]: SimpleNamespace(logprob=-0.5)}], finish_reason="length")
    return SimpleNamespace(prompt_token_ids=ids, outputs=[one] * n)


def parameters(**arguments):
    if "tempo" in arguments:
        raise TypeError("Unexpected keyword argument 'tempo'")
    if arguments.get("temperature", 1) < 0:
        raise ClientError("temperature must be non-negative")
    return Settings(arguments)


@pytest.fixture
def platform(monkeypatch):
    """Puts modules in vLLM's place; what it yields says which device there is."""
    device = SimpleNamespace(device_type="cuda", is_cpu=lambda: device.device_type == "cpu")
    contents = {
        "vllm": {"LLM": LLM, "SamplingParams": parameters},
        "vllm.sampling_params": {
            "StructuredOutputsParams": lambda **found: ("structured", found),
            "RequestOutputKind": SimpleNamespace(FINAL_ONLY="final"),
        },
        "vllm.platforms": {"current_platform": device},
        "vllm.exceptions": {"VLLMClientError": ClientError},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": Dead},
    }
    for name, names in contents.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm"].exceptions = sys.modules["vllm.exceptions"]  # type: ignore[attr-defined]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # put back afterwards
    return device


@pytest.fixture
def backend(platform):
    served = ServedModel("some/model", revision="r1", tensor_parallel_size=2, vllm_model_impl="transformers")
    made = VLLMBackend(served)
    yield made
    made.close()


def completed(backend, *requests):
    return [future.result(20) for future in [backend.submit(request) for request in requests]]


WEIGHTS = [WeightBody(name="w", dtype="float32", shape=[2]), WeightBody(name="v", dtype="bfloat16", shape=[])]
ENTRIES = [("w", "float32", [2]), ("v", "bfloat16", [])]
JOIN = {"host": "127.0.0.1", "port": 51216, "size": 3, "backend": "gloo", "timeout_s": 5.0}


def test_options_reach_vllm(backend):
    assert backend._llm.settings == {
        "model": "some/model", "revision": "r1", "tokenizer_revision": "r1", "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.9, "dtype": "auto", "max_model_len": None, "enable_prefix_caching": None,
        "enforce_eager": False, "kv_cache_dtype": "auto", "trust_remote_code": False, "model_impl": "transformers",
        "worker_extension_cls": WORKER, "logprobs_mode": "processed_logprobs", "seed": 0,
    }  # fmt: skip
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert backend.world_size == 2
    assert backend.about() == {
        "model": "some/model", "dtype": "bfloat16", "max_model_len": 32, "vocab_size": 99, "device": "cuda",
    }  # fmt: skip


def test_completions_come_with_their_log_probs(backend):
    requests = [
        {
            "prompt_ids": [5, 6],
            "sampling": {"max_tokens": 3, "structured_outputs": {"regex": "a"}, "seed": 4},
        },
        {"prompt_ids": [8]},
    ]
    assert completed(backend, *requests) == [
        {"ids": [7, 8, 9], "logprobs": [-7.0, -8.0, -9.0], "finish_reason": "length"},
        {"ids": [9], "logprobs": [-9.0], "finish_reason": "length"},
    ]
    assert backend._llm.llm_engine.asked == [
        {"max_tokens": 3, "structured_outputs": ("structured", {"regex": "a"}), "seed": 4, "logprobs": 0},
        {"logprobs": 0},
    ]


def test_requests_join_and_leave_and_weights_wait_for_them(backend):
    """A short one ends beside a long one; new weights wait for what runs, and what comes later for them."""
    engine, taken = backend._llm.llm_engine, threading.Semaphore(0)
    step = engine.step

    def stepping():
        taken.acquire()
        return step()

    engine.step = stepping
    backend.broker.call(lambda steps: setattr(backend, "channel", "c")).result(20)
    long, dropped = (backend.submit({"prompt_ids": [1], "sampling": {"max_tokens": 50}}) for _ in range(2))
    taken.release()
    short = backend.submit({"prompt_ids": [2], "sampling": {"max_tokens": 2}})
    taken.release(5)
    assert short.result(20)["ids"] == [3, 4] and not long.done()
    dropped.cancel()
    loading = threading.Thread(target=backend.load, args=(WEIGHTS,), kwargs={"whole": True}, daemon=True)
    loading.start()
    while not backend.broker._arriving.qsize() and not backend.broker._waiting:
        time.sleep(0.001)
    late = backend.submit({"prompt_ids": [4], "sampling": {"max_tokens": 1}})
    taken.release(20)
    assert not long.done() and not late.done() and backend._llm.calls[-1][0] != "reset"
    taken.release(100)
    assert len(long.result(20)["ids"]) == 50 and late.result(20)["ids"] == [5]
    loading.join(20)
    assert backend._llm.calls[-1] == ("reset",) and not engine.running


def test_prompts_and_conversations(backend):
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
    asked = GenerateBody(prompts=["a", [1, 2]], images=[pixel, None], n=2, truncate_prompt_tokens=8)
    assert backend.generate(asked) == {
        "prompt_ids": [[7], [1, 2]], "completion_ids": [[7], [7], [1], [1]], "logprobs": [[-0.5]] * 4,
    }  # fmt: skip
    _, prompts, settings, others = backend._llm.calls[-1]
    assert prompts[0]["multi_modal_data"]["image"][0].size == (1, 1) and prompts[0]["prompt"] == "a"
    assert prompts[1] == {"prompt_token_ids": [1, 2]} and others["tokenization_kwargs"] == {"truncate_prompt_tokens": 8}
    assert settings["n"] == 2 and settings["top_k"] == 0  # -1 means all, as 0 does in vLLM
    with pytest.raises(ValueError, match="PNG or JPEG in base64"):
        backend.generate(GenerateBody(prompts=["a"], images=["hello"]))
    asked = ChatBody(messages=[[{"role": "user", "content": "?"}]], tools=[{"x": 1}], chat_template="t")
    assert backend.chat(asked) == {"prompt_ids": [[3]], "completion_ids": [[3]], "logprobs": [[-0.5]]}
    _, conversations, _, others = backend._llm.calls[-1]
    assert conversations == [[{"role": "user", "content": "?"}]]
    assert others == {
        "chat_template": "t", "tools": [{"x": 1}], "chat_template_kwargs": None, "tokenization_kwargs": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "said"),
    [({"tempo": 1}, "Unexpected keyword argument 'tempo'"), ({"temperature": -1}, "must be non-negative"), ({"_private": 1}, "got _private"), ({"output_kind": 1}, "got output_kind")],
)  # fmt: skip
def test_sampling_arguments_that_vllm_does_not_take(backend, sampling, said):
    with pytest.raises(ValueError, match=said):
        completed(backend, {"prompt_ids": [1], "sampling": sampling})


def test_errors_of_vllm(backend):
    backend._llm.raises = ClientError("the prompt is too long")
    with pytest.raises(ValueError, match="too long"):
        backend.generate(GenerateBody(prompts=["a"]))
    raises = backend._llm.llm_engine.raises
    raises["add"] = ClientError("the prompt is too long")
    with pytest.raises(ValueError, match="too long"):
        completed(backend, {"prompt_ids": [1]})
    backend._llm.raises = raises["add"] = Dead("see above.")
    with pytest.raises(BackendDied, match=r"vLLM's engine has ended: see above\."):
        backend.generate(GenerateBody(prompts=["a"]))
    with pytest.raises(BackendDied, match=r"vLLM's engine has ended: see above\."):
        completed(backend, {"prompt_ids": [1]})
    raises["step"] = Dead("see above.")
    for _ in range(2):  # that one and later ones
        with pytest.raises(BackendDied, match=r"vLLM's engine has ended: see above\."):
            completed(backend, {"prompt_ids": [1]})


def test_weights_need_a_channel_and_clear_the_cache(backend):
    with pytest.raises(NoChannel, match="init_communicator"):
        backend.load(WEIGHTS, whole=True)
    backend.join(**JOIN)
    first = backend.channel
    assert backend._llm.calls[-1] == ("join_weight_channel", "127.0.0.1", 51216, 3, "gloo", 5.0)
    backend.load(WEIGHTS, whole=True)
    assert backend._llm.calls[-2:] == [("receive_weights", ENTRIES, True), ("reset",)]
    backend.load(WEIGHTS[:1], whole=False)
    assert backend._llm.calls[-2] == ("receive_weights", ENTRIES[:1], False)
    backend.join(**JOIN)
    assert first and backend.channel and backend.channel != first
    backend.leave(first)  # another run's, at its exit
    assert backend.channel is not None and backend._llm.calls[-1][0] == "join_weight_channel"
    backend.leave()
    assert backend.channel is None and backend._llm.calls[-1] == ("leave_weight_channel",)


def test_a_failed_update_is_no_model_until_a_whole_one_came(backend):
    backend.join(**JOIN)
    backend._llm.worker_says = "out of memory"
    with pytest.raises(RuntimeError, match="worker 1: out of memory"):
        backend.load(WEIGHTS, whole=True)
    assert backend.channel is None
    with pytest.raises(RuntimeError, match=r"worker 1: out of memory.*Send all of them again"):
        completed(backend, {"prompt_ids": [1]})
    with pytest.raises(RuntimeError, match="worker 1: out of memory"):
        backend.join(**JOIN)
    assert backend.channel is None
    backend._llm.worker_says = None
    backend.join(**JOIN)
    backend.load(WEIGHTS, whole=False)
    with pytest.raises(RuntimeError, match="Send all of them again"):
        backend.generate(GenerateBody(prompts=["a"]))
    backend.load(WEIGHTS, whole=True)
    assert completed(backend, {"prompt_ids": [1]})


def test_closing_ends_the_engine_and_removes_its_shared_memory(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_backend, "_SHARED_MEMORY", tmp_path)
    for name in ("shm-1-tp:0-[0-1]-cpushm_0", "shm-1-tp:0-[0-1]-cpushm_1", "shm-12-cpushm_0", "shm-1-other"):
        (tmp_path / name).touch()
    backend.close()
    assert backend._llm.calls[-1] == ("shutdown", 30.0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["shm-1-other", "shm-12-cpushm_0"]
