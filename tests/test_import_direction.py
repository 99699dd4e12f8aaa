"""The layout of `src/trl`, read from the source: imports point one way, and no file is a grab-bag."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "trl"

# A folder imports from groups with a lower number, from itself, and from its group only where _WITHIN says so.
LAYERS = (
    ("tensors", "options", "checkpoints"),
    ("objectives", "data"),
    ("collators", "models", "reporting"),
    ("generation", "rewards"),
    ("rollouts",),
    ("agents",),
    ("methods",),
    ("trainer", "legacy"),
    ("experimental",),
    ("scripts", "cli"),
)
LEVEL = {folder: level for level, group in enumerate(LAYERS) for folder in group}
_WITHIN = {
    ("checkpoints", "options"),
    ("trainer", "legacy"),
    ("legacy", "trainer"),
    ("cli", "scripts"),
    ("scripts", "cli"),
}
_TYPES = re.compile(r"trl\.trainer\.\w+_config")
"""Configs: methods name those whose settings they read as types, in a block of `TYPE_CHECKING`."""
EVERYWHERE = {"_lazy", "_names", "__version__"}  # fine at any level

BANNED_NAMES = ("utils.py", "helpers.py", "common.py")
UNFINISHED = re.compile(r"NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> list[str]:
    parts = ["trl", *path.relative_to(PACKAGE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import, at module level or inside a function, relative ones resolved.

    `from trl import models` counts as `trl.models`, and `import_module("trl.x")` with a literal counts as an import.
    """
    package = module_of(path) if path.name == "__init__.py" else module_of(path)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                origin = ".".join([*base, *([module] if module else [])])
                bare = origin == "trl"
                yield from ((node.lineno, f"{origin}.{a.name}" if bare else origin) for a in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "find_spec") | ast.Attribute(attr="import_module" | "find_spec"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def type_checking_lines(path: Path) -> set[int]:
    """The lines of blocks under `if TYPE_CHECKING`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    blocks = (node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or 0) + 1)}


def place(folder_or_file: str) -> str:
    return folder_or_file.removesuffix(".py")


def upward_imports(path: Path) -> list[str]:
    """Every import of `path` that the order of `LAYERS` does not allow, as `file:line imports name`."""
    here, bad, typed = place(path.relative_to(PACKAGE).parts[0]), [], type_checking_lines(path)
    for line, name in imported_modules(path):
        parts = name.split(".")
        if parts[0] != "trl" or len(parts) < 2:
            continue
        there = parts[1]
        if there not in LEVEL:
            allowed = there in EVERYWHERE
        elif here == "methods" and line in typed and _TYPES.fullmatch(name):
            allowed = True
        elif here in LEVEL:
            allowed = here == there or LEVEL[there] < LEVEL[here] or (here, there) in _WITHIN
        else:
            allowed = False
        if not allowed:
            bad.append(f"{label(path)}:{line} imports {name}")
    return bad


def test_every_folder_has_a_level():
    known = {*LEVEL, *EVERYWHERE, "__init__", "accelerate_configs", "py.typed", "__pycache__"}
    assert {place(child.name) for child in PACKAGE.iterdir()} <= known


def test_imports_point_one_way():
    bad = [line for path in sources() if path != PACKAGE / "__init__.py" for line in upward_imports(path)]
    assert not bad, "\n".join(bad)


def circles() -> list[list[str]]:
    """The files of each import circle."""
    modules = {".".join(module_of(path)): path for path in sources()}
    after = {
        module: {name for _, name in imported_modules(path) if name in modules and name != module}
        for module, path in modules.items()
    }
    while ends := [module for module, names in after.items() if not names & after.keys()]:
        for module in ends:
            del after[module]
    while starts := after.keys() - {name for names in after.values() for name in names}:
        for module in starts:
            del after[module]
    return [sorted(after)] if after else []


def test_no_files_import_each_other_in_a_circle():
    assert not circles()


@pytest.mark.parametrize(
    ("file", "source", "names"),
    [
        ("tensors/x.py", "from trl.models.scoring.causal import score", ["trl.models.scoring.causal"]),
        ("tensors/x.py", "def f():\n    from ..models import forward", ["trl.models"]),
        ("data/x.py", "from trl import models", ["trl.models"]),
        ("models/x.py", "import trl.trainer.utils", ["trl.trainer.utils"]),
        ("models/x.py", "from trl import SFTTrainer", ["trl.SFTTrainer"]),
        ("models/x.py", "import_module('trl.trainer.sft_trainer')", ["trl.trainer.sft_trainer"]),
        ("methods/x.py", "from trl.trainer.dpo_config import DPOConfig", ["trl.trainer.dpo_config"]),
        ("methods/x.py", "if TYPE_CHECKING:\n    from trl.trainer.dpo_config import DPOConfig", []),
        ("models/x.py", "from .attention import a\nfrom trl.data.formats import b\nimport torch", []),
    ],
)
def test_the_reader_sees_every_kind_of_import(tmp_path, monkeypatch, file, source, names):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(source)
    assert [line.split(" imports ")[1] for line in upward_imports(path)] == names


def test_no_file_is_a_grab_bag():
    stray = [label(path) for path in sources() if path.name in BANNED_NAMES]
    assert not stray, f"{stray}: name the file after what it holds"


def test_nothing_is_left_unfinished():
    found = [
        f"{label(path)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert not found, "\n".join(found)
