import stat

import pytest

from trl.generation.serving.connection import VARIABLE, client_token, server_token, token_file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_server_of_this_machine_leaves_its_token_in_a_private_file(cache):
    with server_token("127.0.0.1", 8000) as token:
        file = token_file(8000)
        assert file == cache / "trl" / "vllm-serve-8000.token" and file.read_text() == token and len(token) > 40
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for host in ("127.0.0.1", "localhost", "0.0.0.0", "::1"):
            assert client_token(host, 8000) == token
        assert client_token("10.0.0.7", 8000) is None  # another machine has no use for it
        assert client_token("127.0.0.1", 8001) is None
    assert not list((cache / "trl").iterdir())


def test_the_file_of_a_later_server_stays():
    with server_token("localhost", 8000):
        with server_token("localhost", 8000):
            pass
        token_file(8000).write_text("later")
    assert client_token("localhost", 8000) == "later"


def test_the_environment_wins_and_leaves_no_file(cache, monkeypatch):
    monkeypatch.setenv(VARIABLE, "shared")
    with server_token("0.0.0.0", 8000) as token:
        assert token == "shared" == client_token("10.0.0.7", 8000) == client_token("127.0.0.1", 8000)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "gpu-node", ""])
def test_a_server_for_other_machines_needs_one_from_the_environment(host, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    with (
        pytest.raises(ValueError, match=rf"--host {host} needs a secret in {VARIABLE}"),
        server_token(host, 8000),
    ):
        pass
