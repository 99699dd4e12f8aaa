"""`.ci/install.py`: how far an installation is, from pip's lines and the packages in place."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / ".ci" / "install.py"


@pytest.fixture
def progress(tmp_path):
    spec = importlib.util.spec_from_file_location("install", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.Progress(expected=4)
    found.folder, found.there = tmp_path, 0
    return found


def test_packages_are_found_and_then_unpacked(progress, tmp_path):
    assert progress.share() == 0
    for line in ("Collecting a", "  Downloading a", "Processing b.whl"):
        progress.read(line)
    assert progress.share() == pytest.approx(0.3 * 2 / 4)
    progress.read("Installing collected packages: a, b, c, d")
    assert progress.share() == pytest.approx(0.3)
    (tmp_path / "a-1.dist-info").mkdir()
    assert progress.share() == pytest.approx(0.3 + 0.7 / 4)
    progress.started -= 19
    assert "48%, 19 s, about 21 s left" in progress.text()
