"""What a run will write, and whether it can: asked before anything is loaded."""

from types import SimpleNamespace

import huggingface_hub
import pytest

from trl.scripts.loading import check_output_dir, check_push


def test_a_file_where_the_output_folder_shall_be_is_named(tmp_path):
    file = tmp_path / "notes.md"
    file.write_text("mine")
    check_output_dir(tmp_path)
    check_output_dir(tmp_path / "new" / "run")
    for place in (file, file / "run"):
        with pytest.raises(ValueError, match=r"output_dir .*notes.md' is a file"):
            check_output_dir(place)
    assert file.read_text() == "mine"


def test_a_place_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path))
    with pytest.raises(ValueError, match=rf"output_dir '.*/new/run' .*'{tmp_path}' is read-only"):
        check_output_dir(tmp_path / "new" / "run")
    assert asked == [tmp_path]


@pytest.mark.parametrize(
    ("offline", "token", "message"),
    [(True, "t", "HF_HUB_OFFLINE is set"), (False, None, "`hf auth login`"), (False, "t", None)],
)
def test_pushing_needs_a_hub_and_a_token(monkeypatch, offline, token, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    check_push(SimpleNamespace(push_to_hub=False))
    args = SimpleNamespace(push_to_hub=True, hub_token=None)
    if message is None:
        check_push(args)
    else:
        with pytest.raises(ValueError, match=message):
            check_push(args)
    if not offline:
        check_push(SimpleNamespace(push_to_hub=True, hub_token="given"))
