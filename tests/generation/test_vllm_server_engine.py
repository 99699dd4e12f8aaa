"""Training with a vLLM server, in whose place the embedded engine answers: the same numbers as without a server."""

import functools
import logging
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.generation.served_runs import KINDS, TURNS, asks, found_of, trainer_of
from tests.generation.stand_in import TOKEN, StandIn, serving
from tests.ports import free_port
from tests.tiny import tiny_model
from tests.trainer import grpo_runs
from tests.trainer.group_methods import comparable
from tests.trainer.resume_worker import tokenizer
from tests.two_processes import launch, need_deepspeed
from trl.experimental.agents import Endpoint
from trl.generation.engine import Engine, Sampling
from trl.generation.live import Request
from trl.generation.serving import app
from trl.generation.transformers.engine import TransformersEngine
from trl.generation.vllm.client import VLLMClient
from trl.generation.vllm.server_engine import VLLMServerEngine
from trl.trainer.base_trainer import BaseTrainer

GREEDY = Sampling(max_new_tokens=6, do_sample=False, stop_token_ids=())


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("TRL_VLLM_SERVER_TOKEN", TOKEN)


@pytest.fixture
def group_port():
    return free_port()


def zeroed(kind):
    """A stand-in of the policy of some runs, all of whose weights are 0 until it is sent others."""
    stand_in = StandIn(KINDS[kind][1]())
    with torch.no_grad():
        for weight in stand_in.served.parameters():
            weight.zero_()
    return stand_in


def assert_same(found, expected, atol):
    assert len(found["gradients"]) == len(expected["gradients"])
    torch.testing.assert_close(found["gradients"], expected["gradients"], rtol=0, atol=atol)
    for one, other in zip([*found["logs"], found["eval"]], [*expected["logs"], expected["eval"]], strict=True):
        assert one.keys() == other.keys()
        assert {name: one[name] for name in comparable(other)} == pytest.approx(
            {name: other[name] for name in comparable(other)}, rel=1e-6, abs=atol
        )


# ---- the same numbers


def adapter_of(kind):
    adapter = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return {"peft_config": adapter} if kind == "lora" else {}


@functools.cache
def without_server(kind, method="grpo"):
    return found_of(kind, method, given=adapter_of(kind))[1]


@pytest.mark.parametrize(
    ("kind", "method"),
    [("plain", "grpo"), ("plain", "rloo"), ("tools", "grpo"), ("agents", "grpo"), ("lora", "grpo")],
)
def test_runs_with_a_server_equal_those_with_a_copy_here(kind, method, group_port):
    """Gradients, logs and an evaluation; weights are sent once for each window and once for the evaluation."""
    stand_in = zeroed(kind)
    with serving(stand_in) as url:
        found = found_of(kind, method, given=adapter_of(kind), served=asks(url, group_port))[1]
    assert_same(found, without_server(kind, method), 1e-9)
    assert stand_in.calls.count("load") == 3 and stand_in.calls.count("join") == 1
    completions = 28 if kind == "agents" else 2 * 16 + 28  # of two windows and the evaluation
    assert (stand_in.calls.count("complete") > completions) == (kind in TURNS)
    assert stand_in.received[0] == set(stand_in.served.state_dict())  # adapters are added on the way
    assert max(float(step.abs().max()) for step in found["gradients"][-1].values()) > 0.01


@pytest.mark.distributed
@pytest.mark.parametrize("kind", TURNS)
def test_two_processes_share_one_server(kind, tmp_path, group_port):
    """With tools they ask together, one of them now and then for nothing; all equals one process without a server."""
    stand_in = zeroed(kind)
    with serving(stand_in) as url:
        launch("tests.generation.served_runs", str(tmp_path), kind, url, str(group_port))
    found = torch.load(tmp_path / "found_0.pt")
    assert_same(found, without_server(kind), 1e-6)
    other = torch.load(tmp_path / "found_1.pt")["refused"]  # of which the one asked for nothing that could be wrong
    assert other.startswith("ValueError: prompts[1] is empty")
    assert found["refused"] == f"ValueError: in process 1: {other.removeprefix('ValueError: ')}"
    assert stand_in.calls.count("load") == 3 and stand_in.calls.count("join") == 1


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", ["zero3"])
def test_sharded_weights_are_gathered_and_sent(how, tmp_path, group_port):
    need_deepspeed(how)
    stand_in = zeroed("sharded")
    with serving(stand_in) as url:
        launch("tests.generation.served_runs", str(tmp_path), how, url, str(group_port))
    assert stand_in.calls.count("load") == 3
    trainer, expected = found_of("sharded")
    found = torch.load(tmp_path / "found_0.pt")
    for one, other in zip(found["logs"], expected["logs"], strict=True):
        for name in comparable(other):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), name
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(stand_in.served.state_dict()[name], weight, rtol=1e-5, atol=1e-5, msg=name)


def test_an_engine_without_a_trainer(group_port):
    policy = tiny_model("llama")
    stand_in = StandIn(policy)
    with serving(stand_in) as url:
        engine = VLLMServerEngine(policy, VLLMClient(url, group_port=group_port))
        assert isinstance(engine, Engine) and not engine.exact and not engine.together
        prompts = [[5, 6, 7], [8, 9]]
        seen = []
        for step in range(2):
            with torch.no_grad():
                policy.model.norm.weight.mul_(-1)
            engine.sync_weights(policy, step)
            engine.sync_weights(policy, step)  # it has them
            found = engine.generate(prompts, GREEDY)
            expected = TransformersEngine(policy).generate(prompts, GREEDY)
            assert [one.ids for one in found] == [one.ids for one in expected]
            seen.append([one.ids for one in found])
        assert seen[0] != seen[1] and len(stand_in.received) == 2
        assert engine.generate([], GREEDY) == []
        engine.close()
        assert stand_in.channel is None


def test_requests_join_and_leave(group_port):
    """The tokens are those of one call, a short request ends beside a long one, and a cancelled one leaves the server."""
    policy = tiny_model("gpt2", dtype=torch.float64, max_position_embeddings=4096)
    stand_in, heard = StandIn(policy), []
    sampling = Sampling(max_new_tokens=6, seed=3, stop_token_ids=())
    prompts, limits = [[5, 6, 7], [8, 9], [5, 6, 7], [4]], [6, 3, 2, 5]
    long = Request([5], Sampling(max_new_tokens=4000, seed=3, stop_token_ids=()))
    with serving(stand_in) as url:
        engine = VLLMServerEngine(policy, VLLMClient(url, group_port=group_port))
        engine.sync_weights(policy, 0)
        expected = engine.generate(prompts, sampling, limits=limits)
        with engine.live() as live:
            endless, found = live.submit(long), {}
            each = zip(prompts, limits, strict=True)
            numbers = [
                live.submit(Request(prompt, sampling, stream, limit, heard.append if stream == 1 else None))
                for stream, (prompt, limit) in enumerate(each)
            ]
            while len(found) < len(numbers):
                found |= live.step()
            live.cancel(endless)
            assert live.step() == {} and not live.busy
            live.submit(long)  # the end of the block gives it up
        while stand_in.broker._running:
            time.sleep(0.01)
        assert not stand_in.steps.live.busy
        engine.close()
    for number, one in zip(numbers, expected, strict=True):
        assert (found[number].ids, found[number].finish_reason) == (one.ids, one.finish_reason)
        torch.testing.assert_close(found[number].logps, one.logps)
    assert heard == [expected[1].ids]


# ---- a server that ends


@pytest.mark.parametrize("how", ["stops", "other weights"])
def test_agents_of_a_server_that_ends_are_told(how, group_port, monkeypatch):
    monkeypatch.setattr(app, "_ENDING_S", 0.2)  # for the agent's request
    policy = tiny_model("gpt2", max_position_embeddings=4096)
    stand_in, sampling = StandIn(policy), Sampling(max_new_tokens=4000, seed=3, stop_token_ids=())
    with ExitStack() as running:
        engine = VLLMServerEngine(policy, VLLMClient(running.enter_context(serving(stand_in)), group_port=group_port))
        engine.sync_weights(policy, 0)
        with Endpoint(engine, tokenizer(), sampling=sampling) as endpoint:
            session = endpoint.session()
            client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
            threading.Timer(0.3, running.close if how == "stops" else stand_in.leave).start()
            with pytest.raises(openai.InternalServerError, match=r"The engine has ended \(ServerLost: "):
                client.completions.create(model="policy", prompt=[5, 6], max_tokens=500)
        assert engine._sent is None


class AtStep(TrainerCallback):
    """Does something before a step's rollout."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def test_a_server_that_is_started_anew_gets_the_weights_again(group_port, caplog):
    first, second = zeroed("plain"), zeroed("plain")
    with ExitStack() as running:
        url = running.enter_context(serving(first))

        def restart():
            running.close()
            running.enter_context(serving(second, int(url.rpartition(":")[2])))

        with caplog.at_level(logging.WARNING, logger="trl"):
            given = {"callbacks": [AtStep(2, restart)]}
            found = found_of("plain", given=given, served=asks(url, group_port))[1]
    assert_same(found, without_server("plain"), 1e-9)
    assert len(first.received) == 1 and len(second.received) == 2
    assert "has lost its weights" in caplog.text


def test_a_server_whose_engine_died_is_one_that_ended(group_port):
    """Found out by the question for its health, and waited for until there is another one."""
    policy, first, second = (
        tiny_model("llama"),
        StandIn(tiny_model("llama", seed=1)),
        StandIn(tiny_model("llama", seed=1)),
    )
    with ExitStack() as running:
        url = running.enter_context(serving(first))
        engine = VLLMServerEngine(policy, VLLMClient(url, group_port=group_port), patience=20.0)
        engine.sync_weights(policy, 0)
        first.dead = "its engine is gone"
        with pytest.raises(ConnectionError, match=r"No vLLM server answered .*its engine is gone"):
            VLLMClient(url)
        running.close()
        running.enter_context(serving(second, int(url.rpartition(":")[2])))
        (found,) = engine.generate([[5, 6, 7]], GREEDY)
        assert found.ids == TransformersEngine(policy).generate([[5, 6, 7]], GREEDY)[0].ids
        assert len(first.received) == len(second.received) == 1
        engine.close()


def test_completions_by_other_weights_are_not_taken(group_port):
    """A server that was started anew since the weights were sent, and one that another program has sent weights."""
    policy, stand_in = tiny_model("llama"), StandIn(tiny_model("llama", seed=1))
    with serving(stand_in) as url:
        engine = VLLMServerEngine(policy, VLLMClient(url, group_port=group_port))
        engine.sync_weights(policy, 0)
        stand_in.leave()
        stand_in.served.load_state_dict(tiny_model("llama", seed=1).state_dict())
        (found,) = engine.generate([[5, 6, 7]], GREEDY)
        assert found.ids == TransformersEngine(policy).generate([[5, 6, 7]], GREEDY)[0].ids
        assert len(stand_in.received) == 2
        other = VLLMClient(url, group_port=group_port)
        other.init_communicator("cpu")
        with pytest.raises(RuntimeError, match="Another program gave weights"):
            engine.generate([[5, 6, 7]], GREEDY)
        other.close_communicator()
        stand_in.served.load_state_dict(tiny_model("llama", seed=1).state_dict())
        engine.sync_weights(policy, 0)  # the same step: whoever goes on after an error gets no answer by those weights
        (found,) = engine.generate([[5, 6, 7]], GREEDY)
        assert found.ids == TransformersEngine(policy).generate([[5, 6, 7]], GREEDY)[0].ids
        assert len(stand_in.received) == 3
        engine.close()


def test_weights_that_were_loaded_are_sent_again(group_port, monkeypatch):
    """At the same step, and written in a way that no counter of theirs shows."""
    stand_in = zeroed("plain")
    with serving(stand_in) as url:
        trainer, _ = trainer_of("plain", served=asks(url, group_port))

        def written(*given):
            for weight in trainer.model.parameters():
                weight.data.mul_(0.5)

        rows = grpo_runs.prompts(4)
        trainer.evaluate(rows)
        trainer.evaluate(rows)
        assert len(stand_in.received) == 1
        monkeypatch.setattr(BaseTrainer, "_load_best_model", written)
        trainer._load_best_model()
        trainer.evaluate(rows)
        assert len(stand_in.received) == 2
        torch.testing.assert_close(stand_in.served.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
        written()
        monkeypatch.setattr(BaseTrainer, "load_progress", lambda self, folder: None)
        trainer.load_progress(Path("checkpoint-0"))
        trainer.evaluate(rows)
        assert len(stand_in.received) == 3
        torch.testing.assert_close(stand_in.served.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
        trainer.engine.close()


def test_adapters_of_experts_are_refused_before_anything_is_sent():
    adapter = LoraConfig(target_parameters=["mlp.experts.down_proj"])
    policy = get_peft_model(tiny_model("qwen3_moe"), adapter)
    with pytest.raises(ValueError, match=r"experts .*ParamWrapper.*Use LoRA on linear layers"):
        VLLMServerEngine(policy, None)


@pytest.mark.parametrize("flag", ["is_loaded_in_4bit", "is_quantized"])
def test_quantised_policies_are_refused_before_anything_is_sent(flag):
    policy = tiny_model("llama")
    setattr(policy, flag, True)
    with pytest.raises(ValueError, match="quantised LlamaForCausalLM"):
        VLLMServerEngine(policy, None)


def test_a_server_that_dies_ends_the_run(group_port):
    stand_in = zeroed("plain")
    with ExitStack() as running:
        url = running.enter_context(serving(stand_in))
        given = {"callbacks": [AtStep(2, running.close)]}
        settings = asks(url, group_port, vllm_server_timeout=0.3)
        trainer, _ = trainer_of("plain", given=given, served=settings)
        with pytest.raises(ConnectionError, match=r"No vLLM server answered at .* within 0\.3 s .*trl vllm-serve"):
            trainer.train()


# ---- bad input


def test_no_server_is_named_before_the_model_is_loaded(group_port):
    settings = {"use_vllm": True, "vllm_server_port": group_port, "vllm_server_timeout": 0.1}
    with pytest.raises(ConnectionError, match=rf"http://0\.0\.0\.0:{group_port} within 0\.1 s .*trl vllm-serve"):
        trainer_of("plain", served=settings, given={"model": "no-such-model"})


REFUSED = {
    "vocabulary": ({"vocab_size": 80}, None, {}, "a vocabulary of 80"),
    "window": ({}, 20, {"max_prompt_length": 14}, "context length of 20, expected 21 for max_prompt_length"),
    "long prompt": ({}, 8, {}, r"prompt.* 8 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_work_is_refused_before_the_first_step(kind, group_port):
    fields, window, settings, words = REFUSED[kind]
    stand_in = StandIn(tiny_model("gpt2", **fields), window=window)
    with serving(stand_in) as url, pytest.raises(ValueError, match=words):
        trainer_of("plain", served=asks(url, group_port), **settings)


def test_a_wrong_token_is_refused(group_port, monkeypatch):
    monkeypatch.setenv("TRL_VLLM_SERVER_TOKEN", "another")
    with (
        serving(StandIn(tiny_model("gpt2"))) as url,
        pytest.raises(PermissionError, match="Set TRL_VLLM_SERVER_TOKEN to the same text"),
    ):
        trainer_of("plain", served=asks(url, group_port))


def test_another_precision_is_warned_of(group_port, caplog):
    with serving(StandIn(tiny_model("gpt2"))) as url, caplog.at_level(logging.WARNING, logger="trl"):
        trainer_of("plain", served=asks(url, group_port))
    assert "in float32: log-probs differ" in caplog.text
