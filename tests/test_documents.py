"""The documents keep up with the code: links lead somewhere, examples compile, and what they import exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_blocks(path: Path) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_relative_links_lead_to_files(path):
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_examples_compile_and_import_what_exists(path):
    for block in python_blocks(path):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "trl":
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_named_files_exist(path):
    """Paths in backticks that start with a folder of the repository."""
    named = re.findall(r"`((?:tests|examples|benchmarks|docs)/[\w./-]+)`", path.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]
