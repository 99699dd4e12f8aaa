"""The real `trl vllm-serve`, where vLLM is installed (`make test-vllm`)."""

import os
import signal
import time
from importlib.util import find_spec

import pytest
import torch

from tests.generation.real_server import RealServer, alive, saved
from tests.generation.vllm_runs import model, own_logps

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is an extra: `make test-vllm` installs it apart"),
    pytest.mark.slow,
]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
REQUESTS = {"requests": [{"prompt_ids": prompt, "sampling": GREEDY} for prompt in PROMPTS]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(checkpoint, tmp_path):
    """Starts servers with options, and leaves none behind."""
    started = []

    def begin(*options):
        started.append(RealServer(checkpoint, tmp_path, *options))
        return started[-1]

    yield begin
    for server in started:
        server.kill()


def greedy(policy):
    """transformers' own greedy completions."""
    with torch.no_grad():
        return [
            policy.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)[
                0, len(prompt) :
            ].tolist()
            for prompt in PROMPTS
        ]


def completed(server):
    """The ids of the completions, whose log-probs are right."""
    status, answer = server.ask("/complete/", REQUESTS)
    assert status == 200, answer
    return [one["ids"] for one in answer["completions"]], answer["completions"]


@pytest.mark.timeout(900)
def test_a_server_from_start_to_end(start):
    server = start()
    server.wait()
    about = {"dtype": "float32", "max_model_len": 64, "vocab_size": 64, "device": "cpu", "channel": None}
    status, found = server.ask("/model/")
    assert status == 200 and found.items() >= about.items()
    assert server.ask("/get_world_size/") == (200, {"world_size": 1})

    first, second = model(0), model(1)
    assert greedy(first) != greedy(second)
    ids, completions = completed(server)
    assert ids == greedy(first)
    sampling = {"temperature": 0.7, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    status, drawn = server.ask("/complete/", {"requests": [{"prompt_ids": p, "sampling": sampling} for p in PROMPTS]})
    assert [one["ids"] for one in drawn["completions"]] != ids
    for found, temperature in ((completions, 1.0), (drawn["completions"], 0.7)):
        for prompt, one in zip(PROMPTS, found, strict=True):  # of the distribution that was drawn from
            expected = own_logps(first, prompt, one["ids"], temperature)
            torch.testing.assert_close(torch.tensor(one["logprobs"]), expected, rtol=0, atol=1e-4)
            assert one["finish_reason"] == "length"

    check_the_other_routes(server, ids)

    channel = server.join()
    loaded = {"loaded": len(second.state_dict())}
    assert server.send(channel, second.state_dict()) == (200, loaded)
    assert completed(server)[0] == greedy(second)
    assert server.send(channel, first.state_dict())[0] == 200
    assert completed(server)[0] == greedy(first)  # what was cached for these prompts is forgotten

    status, answer = server.ask(
        "/update_named_param/", {"name": "lm_head.weight", "dtype": "float32", "shape": [64, 64]}
    )
    assert status == 400 and "update_model_params" in answer["error"]
    check_updates_that_fail(server, second)
    assert completed(server)[0] == greedy(second)

    assert server.ask("/reset_prefix_cache/", {}) == server.ask("/close_communicator/", {}) == (200, {"status": "ok"})
    assert server.ask("/model/")[1]["channel"] is None
    assert server.stop(signal.SIGTERM) == 0


def check_the_other_routes(server, ids):
    for sampling, said in (
        ({"tempo": 1}, "tempo"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 8}, "64"),
    ):
        prompt = [5] * 99 if "max_tokens" in sampling else [5]
        status, answer = server.ask("/complete/", {"requests": [{"prompt_ids": prompt, "sampling": sampling}]})
        assert status == 400 and said in answer["error"]
    body = {"temperature": 0.0, "max_tokens": 8, "generation_kwargs": {"ignore_eos": True}}
    status, answer = server.ask("/generate/", body | {"prompts": ["w5", *PROMPTS]})
    assert status == 200 and answer["completion_ids"][1:] == ids
    assert answer["prompt_ids"][1:] == PROMPTS and len(answer["logprobs"][0]) == 8
    status, answer = server.ask("/generate/", body | {"prompts": PROMPTS, "truncate_prompt_tokens": 2})
    assert answer["prompt_ids"] == [prompt[-2:] for prompt in PROMPTS]
    several = body | {
        "prompts": PROMPTS,
        "n": 3,
        "temperature": 1.0,
        "generation_kwargs": {"seed": 1, "ignore_eos": True},
    }
    status, answer = server.ask("/generate/", several)
    assert len(answer["completion_ids"]) == 6 and len({tuple(one) for one in answer["completion_ids"]}) > 3
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    conversations = [[{"role": "user", "content": "w5"}], [{"role": "user", "content": "w8"}]]
    status, answer = server.ask("/chat/", body | {"messages": conversations, "chat_template": template})
    assert status == 200 and list(map(len, answer["completion_ids"])) == [8, 8]


def check_updates_that_fail(server, policy):
    """A weight of the wrong shape, then a sender that goes away: told, not hung; the next whole update mends it."""
    wrong = policy.state_dict() | {"model.layers.0.input_layernorm.weight": torch.ones(3, 3)}
    status, answer = server.send(server.join(), wrong)
    assert status == 500 and "model.layers.0.input_layernorm.weight (float32, [3, 3])" in answer["error"]
    status, answer = server.ask("/complete/", REQUESTS)
    assert status == 500 and "Send all of them again" in answer["error"]
    assert server.ask("/update_weights/", {"weights": []})[0] == 409

    channel = server.join()
    asking = server.meanwhile(
        "/update_weights/", {"weights": [{"name": "lm_head.weight", "dtype": "float32", "shape": [64, 64]}]}
    )
    started = time.monotonic()
    channel.close()
    status, answer = asking.answer()
    assert status == 500 and "The weight channel broke" in answer["error"] and time.monotonic() - started < 20
    channel = server.join()
    assert server.send(channel, policy.state_dict())[0] == 200


@pytest.mark.timeout(900)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two cores")
def test_two_workers(start, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    server = start("--tensor_parallel_size", "2")
    server.wait()
    assert server.ask("/get_world_size/") == (200, {"world_size": 2})
    second = model(1)
    channel = server.join(workers=2)
    assert completed(server)[0] == greedy(model(0))
    for _ in range(2):
        assert server.send(channel, second.state_dict())[0] == 200
    assert completed(server)[0] == greedy(second)
    assert server.stop(signal.SIGINT, group=True) == 0


@pytest.mark.timeout(600)
def test_told_to_end_while_it_loads(start):
    server = start()
    while not server.log.stat().st_size:
        assert server.process.poll() is None, server.log.read_text()[-3000:]
        time.sleep(0.1)
    time.sleep(8)
    assert server.stop(signal.SIGTERM) == 0


@pytest.mark.timeout(600)
def test_a_server_that_is_killed_leaves_no_process(start):
    server = start()
    server.wait()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    until = time.monotonic() + 60
    while alive(server.process.pid) and time.monotonic() < until:
        time.sleep(0.2)
    assert alive(server.process.pid) == []
