"""The command `trl vllm-serve`: options, errors before a model is loaded, and how it ends. vLLM is not needed."""

import os
import signal
import socket
from contextlib import closing, contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.ports import free_port
from trl.cli.main import main
from trl.generation.serving.connection import VARIABLE, client_token, server_token, token_file, until_told
from trl.scripts.vllm_serve import ServeArguments, make_parser

needs_fastapi = pytest.mark.skipif(
    find_spec("fastapi") is None, reason="needs fastapi and uvicorn: pip install 'trl[test]'"
)


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # put back afterwards: the command sets it
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def with_vllm(monkeypatch):
    monkeypatch.setattr("trl.generation.vllm.backend.find_spec", lambda name: True)


def test_options_and_their_defaults(tmp_path):
    (found,) = make_parser().parse_args_and_config(["--model", "m"])
    assert found == ServeArguments("m")
    assert (found.host, found.port, found.gpu_memory_utilization, found.dtype) == (
        "127.0.0.1",
        8000,
        0.9,
        "auto",
    )
    given = [
        "--model",
        "m",
        "--revision",
        "r",
        "--host",
        "0.0.0.0",
        "--port",
        "9",
        "--tensor-parallel-size",
        "2",
    ]
    given += [
        "--gpu_memory_utilization",
        "0.5",
        "--dtype",
        "float32",
        "--max_model_len",
        "77",
        "--kv_cache_dtype",
        "fp8",
    ]
    given += [
        "--enable_prefix_caching",
        "true",
        "--enforce_eager",
        "--trust_remote_code",
        "--log_level",
        "debug",
    ]
    (found,) = make_parser().parse_args_and_config([*given, "--vllm_model_impl", "transformers"])
    assert found == ServeArguments(
        "m", "r", 2, 1, 0.5, "float32", 77, True, True, "fp8", True, "transformers", "0.0.0.0", 9, "debug"
    )
    config = tmp_path / "serve.yaml"
    config.write_text("model: m\nport: 7\nenable_prefix_caching: false\n")
    (found,) = make_parser().parse_args_and_config(["--config", str(config), "--port", "8"])
    assert found == ServeArguments("m", port=8, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--model"),
        (["--model", "m", "--modle", "x"], "Did you mean"),
        (["--model", "m", "--port", "70000"], "port must be a whole number in [1, 65535], got 70000"),
        (["--model", "m", "--gpu_memory_utilization", "2"], "must be in (0, 1], got 2.0"),
        (["--model", "m", "--host", "0.0.0.0"], f"--host 0.0.0.0 needs a secret in {VARIABLE}"),
    ],
)  # fmt: skip
def test_errors_before_a_model_is_loaded(argv, said, with_vllm, capsys):
    assert main(["vllm-serve", *argv]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


@needs_fastapi
def test_a_port_that_is_taken(with_vllm, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["vllm-serve", "--model", "m", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"Nothing can listen on 127.0.0.1:{port}" in said and "Choose another --port" in said
    assert not token_file(port).exists()


@needs_fastapi
@pytest.mark.parametrize("listens", ["first", "meanwhile"])
def test_a_second_server_on_the_port_leaves_the_token_of_the_first(listens, with_vllm, monkeypatch, capsys):
    from trl.generation.serving.app import GenerationServer

    first, idle = GenerationServer("127.0.0.1", 0), SimpleNamespace(close=lambda: None)
    with closing(first), server_token("127.0.0.1", first.port) as token, monkeypatch.context() as patched:
        if listens == "first":
            first.listen()
        else:  # both were loading
            patched.setattr("trl.scripts.vllm_serve.VLLMBackend", lambda model: first.listen() or idle)
        assert main(["vllm-serve", "--model", "m", "--port", str(first.port)]) == 2
        assert f"Nothing can listen on 127.0.0.1:{first.port}" in capsys.readouterr().err
        assert client_token("127.0.0.1", first.port) == token


@needs_fastapi
def test_a_model_that_cannot_be_loaded(with_vllm, monkeypatch, capsys):
    def fails(served):
        assert not token_file(port).exists() and served.model == "m"
        raise OSError("no such model.")

    port = free_port()
    monkeypatch.setattr("trl.scripts.vllm_serve.VLLMBackend", fails)
    assert main(["vllm-serve", "--model", "m", "--port", str(port)]) == 2
    assert "vLLM could not load m: no such model." in capsys.readouterr().err
    assert not token_file(port).exists()


@needs_fastapi
def test_an_error_of_the_running_server_is_shown_whole(with_vllm, monkeypatch):
    def fails(server, backend, token):
        raise ValueError("a defect of ours")

    monkeypatch.setattr("trl.scripts.vllm_serve.VLLMBackend", lambda model: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr("trl.generation.serving.app.GenerationServer.serve", fails)
    with pytest.raises(ValueError, match="a defect of ours"):
        main(["vllm-serve", "--model", "m", "--port", str(free_port())])


@pytest.mark.parametrize("told", [signal.SIGTERM])
def test_told_to_end_it_ends_what_it_began(told):
    before, events = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)], []

    @contextmanager
    def begun():
        try:
            yield
        finally:
            os.kill(os.getpid(), told)  # impatience changes nothing
            events.append("ended")

    with until_told(), begun():
        os.kill(os.getpid(), told)
        events.append("went on")
    assert events == ["ended"]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
