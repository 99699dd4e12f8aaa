"""`trl._lazy.attach` on a package made for the test."""

import importlib
import sys

import pytest

INIT = """
from trl._lazy import attach
__getattr__, __dir__, __all__ = attach(__name__, {"plain": "toy.parts", "renamed": "toy.parts:plain", "gone": "toy.parts"})
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").write_text(INIT)
    (tmp_path / "toy" / "parts.py").write_text("plain = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("toy")
    for name in ("toy", "toy.parts", "toy.old_path"):
        sys.modules.pop(name, None)


def test_nothing_is_imported_before_first_use(toy):
    assert "toy.parts" not in sys.modules
    assert toy.plain is sys.modules["toy.parts"].plain


def test_a_value_is_kept_in_the_package(toy):
    assert "plain" not in vars(toy)
    assert toy.plain is vars(toy)["plain"]


def test_a_name_may_be_another_one_at_home(toy):
    assert toy.renamed is toy.plain


def test_submodules_are_attributes(toy):
    assert toy.parts is importlib.import_module("toy.parts")


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
