"""The site: every page is in its navigation, every public name on an API page, docstrings become Markdown."""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import trl

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("site_script", ROOT / ".ci" / "site.py")
assert spec and spec.loader
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)


def test_navigation_has_every_page_once():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    files = [file for _, file in site.pages_of(nav)]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(files) == sorted({"api/index.md", *(page for page in pages if not page.startswith("api/"))})


def test_api_pages_have_every_public_name():
    pages = site.public_names()
    names = [name for places in pages.values() for path, name in places if path == "trl"]
    outside = {"set_seed"}  # of transformers
    twice = {"PPOv2Config", "PPOv2Trainer"}  # other names of classes that are there
    assert set(trl.__all__) - set(names) <= outside | twice
    assert len(names) == len(set(names))
    assert [name for _, name in pages["SFT"]] == ["SFTConfig", "SFTTrainer"]


def test_docstrings_become_markdown():
    docstring = """Sum of two numbers < 10.

    Args:
        first: one number,
            a digit.
        other (`int`, defaults to `0`):
            another: a digit.

    Example:
        >>> add(2, 3)  # doctest: +SKIP
        5
    """
    assert [line for line in site.markdown(docstring) if line] == [
        "Sum of two numbers &lt; 10.",
        "**Args**",
        "- **first**: one number,",
        "    a digit.",
        "- **other** (`int`, defaults to `0`):",
        "    another: a digit.",
        "**Example**",
        "```pycon",
        ">>> add(2, 3)",
        "5",
        "```",
    ]


def test_each_argument_of_a_docstring_begins_a_line() -> None:
    begins = re.compile(r"    [\w*`]+(, [\w*]+)*( \(.*\))?:")
    wrong = []
    for path in (ROOT / "src" / "trl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else None
            _, _, block = (text or "").partition("Args:\n")
            lines = block.split("\n\n")[0].splitlines()
            wrong += [f"{path.name}: {line}" for line in lines if line[4:5] not in ("", " ") and not begins.match(line)]
            run_in = re.compile(r"\. (?:args|tools|peft_config|optimizers|callbacks|compute_metrics|eval_dataset): ")
            wrong += [f"{path.name}: {line}" for line in lines if run_in.search(line)]
    assert not wrong
