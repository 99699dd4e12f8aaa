"""The client of a vLLM server: what it asks, weights in both ways, and what it says when something is wrong."""

import base64
import http.server
import io
import re
import threading
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image

from tests.generation.stand_in import TOKEN, StandIn, serving
from tests.generation.weight_parts_worker import checkpoint_weights
from tests.ports import free_port
from tests.tiny import tiny_model
from trl.extras.vllm_client import VLLMClient, pil_to_base64
from trl.generation.serving.connection import VARIABLE, ServerLost, server_token


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(VARIABLE, TOKEN)


@pytest.fixture
def group_port():
    return free_port()


@pytest.fixture
def stand_in():
    return StandIn(tiny_model("llama", seed=1))


@pytest.fixture
def url(stand_in):
    with serving(stand_in) as address:
        yield address


def test_questions_have_their_arguments_by_name(url):
    image = Image.new("RGB", (3, 2), (255, 0, 0))
    text = pil_to_base64(image)
    assert Image.open(io.BytesIO(base64.b64decode(text))).getpixel((2, 1)) == (255, 0, 0)
    client = VLLMClient(url)
    asked = client.generate(
        ["a", "b"], [image, None], n=3, repetition_penalty=1.1, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=7,
        truncate_prompt_tokens=4, guided_decoding_regex="x+", generation_kwargs={"seed": 1},
    )["asked"]  # fmt: skip
    shared = {
        "n": 3, "repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 7,
        "truncate_prompt_tokens": 4, "guided_decoding_regex": "x+", "generation_kwargs": {"seed": 1},
    }  # fmt: skip
    assert asked == {"prompts": ["a", "b"], "images": [text, None], **shared}
    assert client.generate([[5, 6]])["asked"]["prompts"] == [[5, 6]]
    part = {"type": "image", "image": image}
    messages = [[{"role": "user", "content": [part, {"type": "text", "text": "hi"}]}]]
    asked = client.chat(messages, max_tokens=2, tools=[{"name": "f"}], chat_template="{{ x }}")["asked"]
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
    assert asked["messages"] == [[{"role": "user", "content": [shown, {"type": "text", "text": "hi"}]}]]
    assert (asked["max_tokens"], asked["tools"], asked["chat_template"]) == (2, [{"name": "f"}], "{{ x }}")
    assert asked["chat_template_kwargs"] is None and asked["temperature"] == 1.0 and asked["top_k"] == -1
    assert client.get_world_size() == 1 and client.model()["max_model_len"] == 256


def test_weights_arrive_bit_for_bit(url, stand_in, group_port):
    policy = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    client = VLLMClient(url, group_port=group_port)
    client.init_communicator("cpu")
    client.update_model_params(policy)
    torch.testing.assert_close(dict(stand_in.served.state_dict()), dict(checkpoint_weights(policy)), rtol=0, atol=0)
    one = torch.randn(96, 32, generator=torch.Generator().manual_seed(2))
    client.update_named_param("lm_head.weight", one)
    assert torch.equal(stand_in.served.lm_head.weight, one)
    client.reset_prefix_cache()
    assert stand_in.calls[-1] == "reset"
    client.close_communicator()
    assert stand_in.channel is None and not client.is_connected
    with pytest.raises(ServerLost, match="Call init_communicator first"):
        client.update_model_params(policy)


def test_a_refused_update_does_not_hang(url, stand_in, group_port):
    client = VLLMClient(url, group_port=group_port)
    client.init_communicator("cpu")
    with pytest.raises(RuntimeError, match=r"failed \(500\): KeyError: 'no.such'"):
        client.update_named_param("no.such", torch.zeros(4))
    assert not client.is_connected
    client.init_communicator("cpu")  # another one works
    client.update_named_param("model.norm.weight", torch.zeros(32))
    assert not stand_in.served.model.norm.weight.any()
    client.close_communicator()


def test_at_its_end_a_program_leaves_the_channel_of_another_one_alone(url, stand_in, group_port):
    first, second = (VLLMClient(url, group_port=group_port) for _ in range(2))
    first.init_communicator("cpu")
    second.init_communicator("cpu")
    first.close_communicator()
    assert stand_in.channel is not None
    second.update_model_params(tiny_model("llama"))
    assert len(stand_in.received) == 1
    second.close_communicator()
    assert stand_in.channel is None


def test_weights_wait_for_a_server_that_is_busy_with_other_requests(url, stand_in, group_port):
    """Longer than a bucket may take; a server that fails meanwhile is an error at once."""
    client = VLLMClient(url, group_port=group_port)
    client.init_communicator("cpu")
    client._channel.timeout_s, load = 0.3, stand_in.load

    def busy(*given, **named):
        time.sleep(0.9)
        return load(*given, **named)

    stand_in.load = busy
    client.update_model_params(tiny_model("llama"))
    torch.testing.assert_close(stand_in.served.state_dict(), tiny_model("llama").state_dict(), rtol=0, atol=0)

    def fails(*given, **named):
        raise RuntimeError("out of memory")

    stand_in.load, started = fails, time.monotonic()
    with pytest.raises(RuntimeError, match="out of memory"):
        client.update_model_params(tiny_model("llama"))
    assert time.monotonic() - started < 5 and len(stand_in.received) == 1 and not client.is_connected


def test_weights_that_cannot_be_read_here_end_the_update_on_both_sides(url, stand_in, group_port):
    client = VLLMClient(url, group_port=group_port)
    client.init_communicator("cpu")
    weights = {
        "model.embed_tokens.weight": torch.zeros(96, 32),
        "model.norm.weight": torch.empty(32, device="meta"),
    }
    started = time.monotonic()
    with pytest.raises(NotImplementedError, match="meta tensor"):
        client.send_weights(weights, weights.values())
    assert time.monotonic() - started < 20 and stand_in.channel is None and not client.is_connected


def test_it_waits_for_a_server_that_starts(stand_in, group_port, caplog, monkeypatch):
    monkeypatch.setattr(VLLMClient.check_server, "__defaults__", (0.0, 0.1))  # tried every tenth of a second
    found = []

    def wait():
        found.append(VLLMClient(server_port=group_port, connection_timeout=20.0))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    with serving(stand_in, group_port):
        waiting.join()
    assert found[0].base_url == f"http://0.0.0.0:{group_port}" and found[0].host == "127.0.0.1"
    assert caplog.text.count("Waiting up to 20 s for the vLLM server at http://0.0.0.0") == 1


def test_a_token_that_changes_is_read_again(stand_in, group_port, monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(stand_in, group_port):
        client = VLLMClient(server_port=group_port)
        with pytest.raises(PermissionError, match="none was found"):
            client.model()
        with server_token("127.0.0.1", group_port), pytest.raises(PermissionError, match="that was given"):
            client.model()
        monkeypatch.setenv(VARIABLE, TOKEN)
        assert client.model()["model"] == "tiny"
        assert VLLMClient(server_port=group_port, token=TOKEN).model()["model"] == "tiny"


def test_other_servers_and_addresses_that_are_none():
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(RuntimeError, match=r"404.* expected a server started with `trl vllm-serve`"):
            VLLMClient(f"http://127.0.0.1:{other.server_port}", connection_timeout=5.0)
        other.shutdown()
    malformed = (
        "localhost:8000",
        "http://:8000",
        "ftp://localhost",
        "http://h:port",
        "http://h:70000",
        "http://[h",
    )
    passwords = ("http://user:secret@127.0.0.1:1", "http://user:se/cret@host:8000", "http://u:secret#x@h")
    for given in (*malformed, *passwords):
        shown = re.sub("(?<=//).*@", "<REDACTED>@", given)  # no password in a message
        with pytest.raises(ValueError, match=re.escape(f"base_url={shown!r} is no address")) as error:
            VLLMClient(given)
        assert error.value.__context__ is None  # whose text would be printed
