"""Prints how large and how deep `src/trl` is, and fails where a number has grown: .ci/size.json holds the least so far.

`--record` writes today's numbers: after a change that lowers some, or that may raise one for a reason its commit gives.
"""

import argparse
import ast
import importlib
import io
import json
import re
import sys
import tokenize
from inspect import isfunction
from pathlib import Path

from transformers import Trainer

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, LIMITS = ROOT / "src" / "trl", ROOT / ".ci" / "size.json"
STABLE = ("SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO")
EXPERIMENTAL = ("CPO", "ORPO", "BCO", "PRM", "PPO")
VAGUE = ("found", "own", "given", "each")
FILES_OF = {
    "XPO": ("trainer/xpo_trainer.py", "trainer/xpo_config.py", "methods/xpo.py"),
    "MiniLLM": ("experimental/minillm", "methods/minillm.py"),
    "SDFT": ("experimental/sdft", "methods/sdft.py"),
}
Texts = dict[Path, str]


def code_lines(text: str) -> int:
    """Lines that are not blank, a comment, or part of a docstring."""
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in blank and token.string.strip()
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def print_folders(texts: Texts) -> None:
    folders: dict[str, list[str]] = {}
    for path, text in texts.items():
        parts = path.relative_to(PACKAGE).parts
        folders.setdefault(parts[0] if len(parts) > 1 else "(top)", []).append(text)
    print(f"{'folder':14} {'files':>5} {'lines':>6} {'code':>6}")
    for name, files in [*folders.items(), ("all", [*texts.values()])]:
        lines = sum(text.count("\n") for text in files)
        print(f"{name:14} {len(files):5} {lines:6} {sum(map(code_lines, files)):6}")


def sizes(texts: Texts) -> dict[str, float]:
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    costs = {
        f"code lines of {name}": sum(
            code_lines(text) for path, text in texts.items() if path.relative_to(PACKAGE).as_posix().startswith(places)
        )
        for name, places in FILES_OF.items()
    }
    return {
        "lines": sum(text.count("\n") for text in texts.values()),
        "kB": sum(len(text.encode()) for text in texts.values()) // 1000,
        "longest file": max(text.count("\n") for text in texts.values()),
        "longest function": max(functions),
        **costs,
    }


def words(texts: Texts) -> dict[str, int]:
    """Names in the code (not in texts and comments): `Any`, and those that do not say what they hold."""
    names = [
        token.string
        for text in texts.values()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NAME
    ]
    return {"Any": names.count("Any"), " + ".join(VAGUE): sum(map(names.count, VAGUE))}


def seams(texts: Texts) -> dict[str, int]:
    """Methods of a trainer that compute a loss past its `Method`, and inspections of a class hierarchy in trainers."""
    base = PACKAGE / "trainer" / "base_trainer.py"  # which defines it
    folders = ("trainer", "experimental")
    files = [path for path in texts if path.relative_to(PACKAGE).parts[0] in folders and path != base]
    trainers = [texts[path] for path in files]
    return {
        "overrides of outcome": sum(len(re.findall(r"def outcome\(\s*self, model", text)) for text in trainers),
        "__mro__ in trainers": sum(text.count("__mro__") for text in trainers),
    }


def trainers() -> dict[str, type]:
    """The public trainers by the name of their method."""
    roots = dict.fromkeys(STABLE, "trl") | {name: f"trl.experimental.{name.lower()}" for name in EXPERIMENTAL}
    return {name: getattr(importlib.import_module(root), f"{name}Trainer") for name, root in roots.items()}


def methods(trainer: type, recorded: frozenset[str]) -> int:
    """Functions, properties, class and static methods of our classes of a trainer, less those that TRL 0.26.2 has."""
    ours = [kind for kind in trainer.__mro__ if kind.__module__.startswith("trl.")]
    names = {
        name
        for kind in ours
        for name, value in vars(kind).items()
        if isinstance(value, staticmethod | classmethod | property) or isfunction(value)
    }
    return len(names - recorded)


def private_hooks(kinds: list[type]) -> list[str]:
    """Private methods of `transformers.Trainer` that one of the trainers overrides."""
    ours = {kind for trainer in kinds for kind in trainer.__mro__ if kind.__module__.startswith("trl.")}
    names = {name for kind in ours for name in vars(kind) if re.match(r"_[a-z]", name)}
    return sorted(name for name in names if isfunction(getattr(Trainer, name, None)))


def depth() -> dict[str, int]:
    kinds = trainers()
    recorded = json.loads((ROOT / "tests" / "recorded_methods.json").read_text(encoding="utf-8"))
    hooks = private_hooks(list(kinds.values()))
    print(f"private hooks of transformers.Trainer: {', '.join(hooks)}")
    counts = {
        f"methods of {name}Trainer": methods(kinds[name], frozenset(recorded[f"{name}Trainer"]))
        for name in ("SFT", "DPO", "GRPO")
    }
    classes = {
        f"classes of {name}Trainer": sum(
            kind.__module__.startswith("trl.") and not kind.__module__.startswith("trl.legacy")
            for kind in trainer.__mro__
        )  # legacy/ stands outside
        for name, trainer in kinds.items()
    }
    return {**counts, **classes, "private hooks": len(hooks)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write today's numbers as the limits")
    record = parser.parse_args().record
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    print_folders(texts)
    numbers = {**sizes(texts), **words(texts), **seams(texts), **depth()}
    if record:
        LIMITS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    print(f"\n{'':28} {'today':>7} {'limit':>7}")
    for name, number in numbers.items():
        print(f"{name:28} {number:7} {limits[name]:7}{'  grown' if number > limits[name] else ''}")
    grown = [name for name, number in numbers.items() if number > limits[name]]
    if grown:
        print(f"\n{', '.join(grown)}: larger than .ci/size.json allows. Make it smaller, or record it and say why.")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
