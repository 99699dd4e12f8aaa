"""The notebooks of `examples/notebooks` run, shortened to a few steps, in a folder that holds nothing else."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def code_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_there_are_six():
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), str(EXAMPLES / "scripts"), *sys.path])
    before = set(sys.modules)
    names: dict[str, Any] = {"__name__": "__main__"}
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if "grpo_agent" in "".join(code_of(notebook)):
        import grpo_agent

        monkeypatch.setitem(grpo_agent.SFT, "max_steps", 5)
    try:
        for number, source in enumerate(code_of(notebook)):
            short = re.sub(r"max_steps=\d+", "max_steps=2", source)
            short = re.sub(r"logging_steps=\d+", "logging_steps=1", short)
            short = re.sub(r"(?<=eval_batch_size=)80", "8", short).replace("select(range(80))", "select(range(8))")
            exec(compile(short, f"{notebook.name}[{number}]", "exec"), names)
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(EXAMPLES)):
                del sys.modules[name]
    trainer = names["trainer"]
    assert trainer.state.global_step == 2 and capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_a_whole_run(notebook):
    """Every code cell was run, in order, and none of its outputs is an error."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    runs = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in runs] == list(range(1, len(runs) + 1))
    assert all(output["output_type"] == "stream" for cell in runs for output in cell["outputs"])
    assert sum(len(cell["outputs"]) for cell in runs) >= 3
