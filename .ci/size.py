"""Prints the size of `src/trl` and how deep its trainers and configs are. Sizes are an aim, not a limit."""

import ast
import importlib
import io
import tokenize
from inspect import isfunction
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "trl"
METHODS = ("SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO")
EXPERIMENTAL = ("CPO", "ORPO", "BCO", "PRM")


def code_lines(text: str) -> int:
    """Lines that are not blank, a comment, or part of a docstring."""
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        for number in range(token.start[0], token.end[0] + 1)
        if token.string.strip()
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def print_files() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    folders: dict[str, list[str]] = {}
    for path, text in texts.items():
        parts = path.relative_to(PACKAGE).parts
        folders.setdefault(parts[0] if len(parts) > 1 else "(top)", []).append(text)
    print(f"{'folder':14} {'files':>5} {'lines':>6} {'code':>6}")
    for name, found in [*folders.items(), ("all", [*texts.values()])]:
        lines = sum(text.count("\n") for text in found)
        print(f"{name:14} {len(found):5} {lines:6} {sum(map(code_lines, found)):6}")
    print(f"{sum(len(text.encode()) for text in texts.values()) / 1e6:.2f} MB")


def print_depth() -> None:
    """Classes of this library in the hierarchy of each trainer and config, and a trainer's distinct methods."""
    print(f"\n{'method':8} {'trainer':>8} {'methods':>8} {'config':>7}")
    for names, root in (
        (METHODS, "trl"),
        (EXPERIMENTAL, "trl.experimental.{}"),
        (("PPO",), "trl.experimental.ppo"),
    ):
        for name in names:
            module = importlib.import_module(root.format(name.lower()))
            kinds = [getattr(module, f"{name}{kind}") for kind in ("Trainer", "Config")]
            trainer, config = ([each for each in kind.__mro__ if each.__module__.startswith("trl.")] for kind in kinds)
            methods = {
                key
                for each in trainer
                for key, value in vars(each).items()
                if isinstance(value, (staticmethod, classmethod, property)) or isfunction(value)
            }
            print(f"{name:8} {len(trainer):8} {len(methods):8} {len(config):7}")


if __name__ == "__main__":
    print_files()
    print_depth()
