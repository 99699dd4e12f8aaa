"""`trl serve`: OpenAI's API over a model, whose key is in a file."""

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.two_processes import ending
from trl.agents.endpoint import Endpoint
from trl.cli.main import main
from trl.generation.serving.app import HTTPServer
from trl.generation.transformers.engine import TransformersEngine

PORT = re.compile(r"on (http://127\.0\.0\.1:\d+/v1)\. The API key is in (\S+)\.$")


@pytest.mark.timeout(60)
def test_a_client_gets_the_models_own_answer(tmp_path, monkeypatch, capsys):
    """Then the process is told to end."""
    model = tiny_model("llama", vocab_size=400, eos_token_id=2)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    monkeypatch.delenv("TRL_VLLM_SERVER_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    messages, run, asked, ended = [{"role": "user", "content": "Hello."}], Endpoint.run, [], threading.Event()

    def told():
        """To a thread that does not wait, as the system may choose: the endpoint's is not woken by it."""
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    def ask(url, place):
        key = Path(place).read_text()
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        given = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8}
        return client.chat.completions.create(**given), key

    with ThreadPoolExecutor() as pool:

        def beside_a_client(endpoint, until):
            asked.append(pool.submit(ask, *PORT.search(capsys.readouterr().out.strip()).groups()))
            asked[0].add_done_callback(lambda _: ended.is_set() or told())
            try:
                run(endpoint, until)
            finally:
                ended.set()

        monkeypatch.setattr(Endpoint, "run", beside_a_client)
        started = time.monotonic()
        assert main(["serve", str(folder), "--port", "0", "--served_model_name", "tiny"]) == 0
        assert time.monotonic() - started < 50  # the alarm of the limit above would wake the endpoint, too
    answer, key = asked[0].result()
    assert key not in capsys.readouterr().out
    words = AutoTokenizer.from_pretrained(folder)
    ids = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    made = AutoModelForCausalLM.from_pretrained(folder).generate(ids, do_sample=False, max_new_tokens=8)
    assert answer.choices[0].message.content == words.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.usage.completion_tokens <= 8


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ([], "model"),
        (["nowhere"], "nowhere"),
        (["MODEL", "--port", "70000"], "port"),
        (["MODEL", "--host", "0.0.0.0"], "TOKEN"),
    ],
)
def test_bad_arguments_are_one_message(line, named, capsys, monkeypatch):
    monkeypatch.delenv("TRL_VLLM_SERVER_TOKEN", raising=False)
    assert main(["serve", *line]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("secret", "taken"), [("", False), ("secret", False), ("", True)])
def test_where_the_key_is_and_a_port_that_is_taken_meanwhile(secret, taken, tmp_path, monkeypatch, capsys):
    engine = TransformersEngine(tiny_model("llama", vocab_size=400), tokenizer=tiny_tokenizer())
    monkeypatch.setenv("TRL_VLLM_SERVER_TOKEN", secret)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Endpoint, "run", lambda self, until: None)
    with closing(HTTPServer("127.0.0.1", 0)) as other:
        monkeypatch.setattr("trl.scripts.serve.loaded_engine", lambda arguments: (taken and other.listen()) or engine)
        assert main(["serve", "MODEL", "--port", str(other.port if taken else 0)]) == 2 * taken
        said = capsys.readouterr()
        if taken:
            assert f"Nothing can listen on 127.0.0.1:{other.port}" in said.err
        else:
            assert ("in TRL_VLLM_SERVER_TOKEN." if secret else f"in {tmp_path}") in said.out


def test_a_key_that_cannot_be_written_is_one_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "trl").touch()
    engine = TransformersEngine(tiny_model("llama", vocab_size=400), tokenizer=tiny_tokenizer())
    monkeypatch.delenv("TRL_VLLM_SERVER_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("trl.scripts.serve.loaded_engine", lambda arguments: engine)
    assert main(["serve", "MODEL", "--port", "0"]) == 2
    assert "Set TRL_VLLM_SERVER_TOKEN." in capsys.readouterr().err


def test_a_missing_extra_is_one_message():
    """`trl serve` where fastapi and uvicorn are not installed."""
    code = (
        "import sys; sys.modules['uvicorn'] = None; sys.modules.pop('trl.generation.serving.app', None); "
        "from trl.cli import main; "
        "sys.exit(main(['serve', 'nowhere', '--port', '0']))"
    )
    status, written = ending("tests.run_code", code)
    assert status == 2 and "Traceback" not in written
    assert "trl serve: error: A server needs uvicorn. Run `pip install 'trl[serve]'`." in written
