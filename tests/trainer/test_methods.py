"""Losses belong to methods: trainers wire parts."""

import ast
import importlib
from pathlib import Path

import pytest

from trl.methods.method import Method
from trl.trainer.base_trainer import BaseTrainer

TRAINERS = Path(importlib.import_module("trl.trainer").__file__ or "").parent
SOURCE = TRAINERS.parent
ROWS = ("sft", "dpo", "kto", "bco", "cpo", "orpo", "reward", "prm")
ONLINE = ("grpo", "rloo")
BASES = ("base_trainer.py", "preference_trainer.py", "unpaired.py", "reference_free_trainer.py", "online_trainer.py")
FILES = (*(f"{name}_trainer.py" for name in (*ROWS, *ONLINE)), *BASES)


def losses_in(file: str) -> set[str]:
    """Functions of `trl.objectives` that trainer classes of a file call."""
    tree = ast.parse((TRAINERS / file).read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    known = {
        alias.asname or alias.name
        for node in imports
        if (node.module or "").startswith("trl.objectives")
        for alias in node.names
    }
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Trainer")]
    calls = [node.func for kind in classes for node in ast.walk(kind) if isinstance(node, ast.Call)]
    return {name for call in calls for name in [getattr(call, "id", "")] if name in known and name.islower()}


@pytest.mark.parametrize("file", FILES)
def test_a_trainer_defines_no_loss(file):
    assert losses_in(file) <= {
        "pair_metrics",
        "entropy_threshold",
    }  # no losses: a log, a quantile over processes


@pytest.mark.parametrize("name", [*ROWS, *ONLINE])
def test_every_method_is_an_object_without_a_trainer(name):
    found = [
        [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
        for module in (
            importlib.import_module(f"trl.{place}") for place in (f"methods.{name}", f"trainer.{name}_trainer")
        )
    ]
    assert any(issubclass(each, Method) for each in found[0])
    assert not any(issubclass(each, Method) for each in found[1])
    (trainer,) = (each for each in found[1] if issubclass(each, BaseTrainer))
    assert "compute_loss" not in vars(trainer)
    ours = [kind.__module__ for kind in trainer.__mro__ if kind.__module__.startswith("trl.")]
    assert len([module for module in ours if not module.startswith("trl.legacy.")]) <= 5  # the ring stands outside


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.stem)
def test_one_protocol(path):
    """A step's terms come from `score` and `terms` of a method: no trainer but the base has an `outcome`."""
    kinds = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)]
    found = [
        kind.name
        for kind in kinds
        if "Trainer" in kind.name
        for part in kind.body
        if getattr(part, "name", "") == "outcome"
    ]
    assert set(found) <= {"BaseTrainer"}


@pytest.mark.parametrize(
    "path",
    [*sorted((SOURCE / "methods").glob("*.py")), *(TRAINERS / file for file in BASES)],
    ids=lambda path: path.stem,
)
def test_the_past_stands_outside(path):
    """Public classes name their ring of legacy/ first; the bases and the methods know nothing of it."""
    assert "trl.legacy" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*ROWS, *ONLINE])
def test_nothing_intercepts_attributes(name):
    module = importlib.import_module(f"trl.trainer.{name}_trainer")
    (trainer,) = (
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and issubclass(kind, BaseTrainer)
    )
    ours = [kind for kind in trainer.__mro__ if kind.__module__.startswith("trl.")]
    assert ours[1].__module__.startswith("trl.legacy.")
    assert not any({"__getattr__", "__getattribute__", "__setattr__"} & vars(kind).keys() for kind in ours)
