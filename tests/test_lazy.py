"""`trl._lazy.attach` on a package made for the test, and the finder of paths without a file."""

import importlib
import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import trl
from trl._names import NAMES, places

INIT = """
from trl._lazy import attach
__getattr__, __dir__, __all__ = attach(__name__)
"""
ROW = {"toy.parts": "plain renamed=plain gone"}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").write_text(INIT)
    (tmp_path / "toy" / "parts.py").write_text("plain = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("toy", "toy.old_path"):
        monkeypatch.setitem(NAMES, module, ROW)
    yield importlib.import_module("toy")
    for name in ("toy", "toy.parts", "toy.old_path"):
        sys.modules.pop(name, None)


def test_nothing_is_imported_before_first_use(toy):
    assert "toy.parts" not in sys.modules
    assert toy.plain is sys.modules["toy.parts"].plain


def test_a_name_may_be_another_one_at_home(toy):
    assert toy.renamed is toy.plain


def test_listing_holds_every_name(toy):
    assert {"plain", "renamed", "__all__"} <= set(dir(toy))
    assert toy.__all__ == ["plain", "renamed", "gone"]


def test_an_unknown_name_suggests_the_closest(toy):
    with pytest.raises(AttributeError, match=r"^toy has no name 'plian'\. Did you mean plain\?$"):
        _ = toy.plian
    with pytest.raises(AttributeError, match=r"`dir\(toy\)` lists what there is"):
        _ = toy.something_else
    assert not hasattr(toy, "_private")


def test_a_plain_module_may_be_lazy_too(toy, tmp_path):
    (tmp_path / "toy" / "old_path.py").write_text(INIT)
    old_path = importlib.import_module("toy.old_path")
    assert old_path.plain is toy.plain
    with pytest.raises(AttributeError, match=r"toy\.old_path has no name 'parts'"):
        _ = old_path.parts


def test_a_broken_entry_is_no_silent_none(toy):
    with pytest.raises(AttributeError, match="gone"):
        _ = toy.gone


# --- paths without a file --------------------------------------------------------------------------------------------

ROOT = Path(trl.__file__).parent
WITHOUT_FILE = [
    module
    for module in NAMES
    if not (path := ROOT.joinpath(*module.split(".")[1:])).with_suffix(".py").exists() and not path.is_dir()
]


def test_every_path_imports_in_a_fresh_process():
    """Each by `import a.b.c` and nothing before it but `trl`; none of them loads torch."""
    assert "trl.core" in WITHOUT_FILE and "trl.experimental.kto.kto_trainer" in WITHOUT_FILE
    lines = [f"import {module}; assert {module}.__spec__.name == {module!r}" for module in WITHOUT_FILE]
    code = "\n".join([*lines, "import sys; assert 'torch' not in sys.modules"])
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", WITHOUT_FILE)
def test_a_path_without_a_file_is_a_module(module):
    loaded = importlib.import_module(module)
    spec = find_spec(module)
    assert spec is not None and spec.name == module
    assert {name for name, _ in inspect.getmembers(loaded)} >= set(loaded.__all__)
    shown = inspect.getsource(loaded)
    found: dict = {}
    exec(shown, found)
    assert all(found[name] is getattr(loaded, name) for name in loaded.__all__)
    for name, place in places(module).items():
        assert f"from {place.partition(':')[0]} import" in shown and name in dir(loaded)


def test_a_folder_that_was_left_over_does_not_hide_a_path(tmp_path):
    """An upgrade may leave `trl/extras/__pycache__` behind, which Python would take for a namespace package."""
    code = f"import trl; trl.__path__.append({str(tmp_path)!r}); import trl.extras; assert 'BestOfNSampler' in dir(trl.extras)"
    (tmp_path / "extras" / "__pycache__").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_path_that_nobody_knows():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'trl\.no_such_path'"):
        importlib.import_module("trl.no_such_path")
