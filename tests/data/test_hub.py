"""Where the Hub cannot be reached, a name is one message at once, and what is in the cache loads."""

import json
import time
from pathlib import Path

import pytest
from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer

from trl.cli.main import main
from trl.data.hub import HubUnreachable, unreachable_reason
from trl.data.sources import load_source
from trl.models.chat_setup import clone_chat_template
from trl.models.loading import create_model_from_path, load_processing_class

CLOSED = "http://127.0.0.1:9"
REASONS = {"no network": "Connection refused", "offline": "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"}


@pytest.fixture(params=REASONS)
def reason(request, monkeypatch):
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", request.param == "offline")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", CLOSED)
    return REASONS[request.param]


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        ("model", lambda name, path: create_model_from_path(name)),
        ("tokenizer", lambda name, path: load_processing_class(name)),
        ("tokenizer", lambda name, path: clone_chat_template(tiny_model("llama"), tiny_tokenizer(), name)),
        ("dataset", lambda name, path: load_source(name, split="train")),
    ],
)
def test_a_name_that_cannot_be_looked_up_is_one_message_at_once(reason, kind, load, tmp_path, caplog):
    start = time.monotonic()
    with pytest.raises(HubUnreachable) as caught:
        load("owner/nothing", tmp_path)
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert message.startswith(
        f"The {kind} 'owner/nothing' is not at {Path('owner/nothing').absolute()}, not in the cache"
    )
    assert f"the Hub ({CLOSED}) cannot be reached: " in message and reason in message
    assert "Give a local path, or download it first" in message
    assert ("--repo-type dataset owner/nothing" in message) is (kind == "dataset")
    assert "Retry" not in caplog.text


@pytest.mark.parametrize("missing", ["model", "dataset"])
def test_commands_end_with_the_message(reason, missing, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    given = {"model": "owner/nothing", "dataset": str(tmp_path / "rows.jsonl")}
    given |= {"dataset": "owner/nothing"} if missing == "dataset" else {}
    line = ["--model_name_or_path", given["model"], "--dataset_name", given["dataset"]]
    status = main(["sft", *line, "--output_dir", str(tmp_path / "run"), "--use_cpu", "true"])
    assert status == 2
    errors = capsys.readouterr().err
    assert errors.count("cannot be reached") == 1 and f"trl sft: error: The {missing} 'owner/nothing'" in errors
    assert "Retry" not in errors


def test_what_is_in_the_cache_is_loaded_without_a_network(reason, tmp_path):
    folder = tmp_path / "models--owner--tiny"
    tiny_model("llama").save_pretrained(folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    model = create_model_from_path("owner/tiny", cache_dir=str(tmp_path))
    assert model.config.model_type == tiny_model("llama").config.model_type
    with pytest.raises(HubUnreachable):
        create_model_from_path("owner/other", cache_dir=str(tmp_path))


def test_a_hub_that_answers_is_reached_once(monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.test")
    monkeypatch.setattr("trl.data.hub._REACHED", set())
    session = type("Session", (), {"head": lambda self, url, timeout: asked.append(url)})()
    monkeypatch.setattr("trl.data.hub.get_session", lambda: session)
    assert [unreachable_reason(), unreachable_reason()] == [None, None]
    assert asked == ["http://hub.test"]
