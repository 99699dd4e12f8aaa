"""Signatures, config fields and metric names are those of `recorded_interface.json`, for the names in `recorded_names.json`.

After a deliberate change: `python -m tests.test_recorded_interface` writes the file anew; read its diff before committing it.
"""

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainingArguments

from tests.test_public_names import default_of
from tests.trainer import (
    cpo_runs,
    dpo_runs,
    grpo_runs,
    iterative_runs,
    kto_runs,
    one_step,
    prm_runs,
    reward_runs,
)
from trl.options.groups import type_name

FILE = Path(__file__).with_name("recorded_interface.json")
NAMES = json.loads(FILE.with_name("recorded_names.json").read_text(encoding="utf-8"))
RECORDED: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def public_objects() -> dict[str, Any]:
    """The classes and functions of this library among the recorded names, each under the first path that has it."""
    found: dict[int, tuple[str, Any]] = {}
    for module in NAMES:
        for name in NAMES[module].split():
            value = getattr(importlib.import_module(module), name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("trl."):
                found.setdefault(id(value), (f"{module}.{name}", value))
    return dict(found.values())


def parameters_of(function: Callable) -> str:
    """The parameters with their defaults, without annotations."""
    given = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in given.parameters.values()]
    return re.sub(r" at 0x\w+", "", str(given.replace(parameters=bare, return_annotation=inspect.Signature.empty)))  # fmt: skip


def signatures() -> dict[str, str]:
    """Of functions, constructors, and the methods that the file names."""
    found = {}
    for path, value in public_objects().items():
        if not (dataclasses.is_dataclass(value) or (inspect.isclass(value) and issubclass(value, BaseException))):
            found[path] = parameters_of(value)
    for path in RECORDED.get("signatures", {}):
        owner, _, method = path.rpartition(":")
        if owner:
            module, _, name = owner.rpartition(".")
            held = inspect.getattr_static(getattr(importlib.import_module(module), name), method)
            found[path] = "property" if isinstance(held, property) else parameters_of(getattr(held, "__func__", held))  # fmt: skip
    return found


def config_fields() -> dict[str, dict[str, str]]:
    """Type, default and choices of every field; those of `TrainingArguments` only where the default differs."""
    inherited = {field.name: default_of(field) for field in dataclasses.fields(TrainingArguments)}
    found = {}
    for path, value in public_objects().items():
        if not dataclasses.is_dataclass(value):
            continue
        outside = inherited if issubclass(value, TrainingArguments) else {}
        # Not `field.type`, which HfArgumentParser narrows.
        hints = {name: hint for each in reversed(value.__mro__) for name, hint in inspect.get_annotations(each).items()}
        found[path] = {
            field.name: f"{type_name(hints[field.name])} = {default_of(field)}"
            + (f" of {list(field.metadata['choices'])}" if field.metadata.get("choices") else "")
            for field in dataclasses.fields(value)
            if outside.get(field.name) != default_of(field) and field.name != "exp_name"  # that of the script
        }
    return found


# --- metrics -----------------------------------------------------------------------------------------------------------


def logged_names(trainer: Any, rows: Any = None) -> str:
    """What two steps and an evaluation log."""
    trainer.train()
    trainer.evaluate(rows if isinstance(rows, Dataset) else Dataset.from_list(rows))
    return " ".join(sorted({name for entry in trainer.state.log_history for name in entry}))


def sft() -> str:
    rows = one_step.fixed_rows()
    trainer, _ = one_step.run(data=Dataset.from_list(rows))
    return logged_names(trainer, rows)


def of_pairs(make: Callable[..., Any], rows: Any, **settings: Any) -> Callable[[], str]:
    return lambda: logged_names(make(**settings), rows)


def group(method: str, **settings: Any) -> Callable[[], str]:
    return lambda: logged_names(grpo_runs.make(method, max_steps=2, **settings)[0], grpo_runs.prompts(2))


def variant(method: str) -> Callable[[], str]:
    from tests.experimental import group_runs

    return lambda: logged_names(group_runs.make(method, max_steps=2)[0], grpo_runs.prompts(2))


def gold() -> str:
    from tests.experimental import gold_runs

    return logged_names(gold_runs.gold(uld_use_hybrid_loss=True, lmbda=0.5, max_steps=4), gold_runs.ROWS)


def data_set_ppo() -> str:
    from tests.experimental import ppo_runs

    return logged_names(ppo_runs.make(max_steps=2)[0], ppo_runs.prompts(2))


def step_ppo() -> str:
    from tests.trainer import ppo_runs

    return " ".join(sorted(ppo_runs.make_trainer().step(*ppo_runs.batch())))


def iterative() -> str:
    trainer, _ = iterative_runs.make()
    trainer.step(**iterative_runs.inputs())
    return " ".join(sorted({name for entry in trainer.state.log_history for name in entry}))


RUNS: dict[str, Callable[[], str]] = {
    "sft": sft,
    "gold": gold,
    "dpo": of_pairs(dpo_runs.make, dpo_runs.pairs()),
    "dpo-mixed": of_pairs(dpo_runs.make, dpo_runs.pairs(), loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
    "cpo": of_pairs(cpo_runs.make, dpo_runs.pairs()),
    "orpo": of_pairs(cpo_runs.make_orpo, dpo_runs.pairs()),
    "kto": of_pairs(kto_runs.make, kto_runs.rows()),
    "bco": of_pairs(kto_runs.make_bco, kto_runs.embedded_rows(), **kto_runs.MATCHED),
    "reward": of_pairs(reward_runs.make, reward_runs.rows()),
    "prm": of_pairs(prm_runs.make, prm_runs.rows()),
    "grpo": group("grpo"),
    "rloo": group("rloo"),
    "gfpo": variant("gfpo"),
    "replay": variant("replay"),
    "online-dpo": group("online_dpo"),
    "nash-md": group("nash_md", num_generations=2),
    "xpo": group("xpo", num_generations=2),
    "ppo": data_set_ppo,
    "ppo-step": step_ppo,
    "iterative-sft": iterative,
}  # fmt: skip


def test_signatures():
    assert signatures() == RECORDED["signatures"]


def test_config_fields():
    assert config_fields() == RECORDED["configs"]


@pytest.mark.parametrize("path", RECORDED.get("configs", ()))
def test_config_fields_are_explained(path):
    """Every field has a help text; a config that is a table of fields lists its own in its docstring."""
    kind = public_objects()[path]
    if not issubclass(kind, TrainingArguments):
        return
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    for field in dataclasses.fields(kind):
        assert field.metadata.get("help"), field.name
        assert field.name in inherited or f"{field.name} (`" in (kind.__doc__ or ""), field.name
    assert json.loads(json.dumps(kind("out", use_cpu=True).to_dict()))["output_dir"] == "out"


@pytest.mark.parametrize("method", RUNS)
def test_metric_names(method):
    assert RUNS[method]() == RECORDED["metrics"][method]


def write() -> None:
    found = {
        "signatures": signatures(),
        "configs": config_fields(),
        "metrics": {method: run() for method, run in RUNS.items()},
    }
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
