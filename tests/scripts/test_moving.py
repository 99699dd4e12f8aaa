"""The guide for those who come from another library: translated files dry-run, and the names in its tables are options."""

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

from trl.cli.main import COMMANDS
from trl.options.spelling import OTHER_NAMES
from trl.scripts.running import run_script

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "moving.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```yaml\n# (\w+)\.yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE))
GPU = {"load_in_4bit", "optim", "attn_implementation", "use_vllm", "vllm_mode", "bf16", "dataset_num_proc"}
CHAT = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Seven apples."}]
ROWS = {
    "sft": {"messages": CHAT},
    "dpo": {"prompt": "Q: How many?", "chosen": " Seven apples.", "rejected": " Next."},
    "grpo": {"prompt": "How many apples are left?", "solution": "7"},
}


def options(command: str) -> set[str]:
    parser = importlib.import_module(COMMANDS[command].module).make_parser()
    return {name.lstrip("-") for action in parser._actions for name in action.option_strings}


def renamed() -> list[tuple[str, str]]:
    """The rows of the tables of Axolotl and LLaMA-Factory: their names, and the first name on our side."""
    tables = PAGE[PAGE.index("## From Axolotl") : PAGE.index("## Rows")]
    cells = re.findall(r"^\| (`.+?`) \| (.+) \|$", tables, flags=re.MULTILINE)
    return [(name, ours) for theirs, ours in cells for name in re.findall(r"`(\w+)`", theirs)]


def test_three_files_are_translated():
    assert sorted(FILES) == ["dpo", "grpo", "sft"]


@pytest.mark.parametrize("name", FILES)
def test_a_translated_file_dry_runs(name, tmp_path, model_path, monkeypatch, capsys):
    """With its own settings, but those that need a GPU or the Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text((json.dumps(ROWS[name]) + "\n") * 64)
    settings = {key: value for key, value in yaml.safe_load(FILES[name]).items() if key not in GPU}
    local = {"model_name_or_path": str(model_path), "dataset_name": str(rows), "output_dir": str(tmp_path)}
    if "chat_template_path" in settings:
        local["chat_template_path"] = str(model_path)
    trial = {"dry_run": True, "use_cpu": True, "report_to": "none"}
    file = tmp_path / "file.yaml"
    file.write_text(yaml.safe_dump({**settings, **local, **trial}))
    module = importlib.import_module(COMMANDS[name].module)
    assert run_script(module.make_parser(), module.main, ["--config", str(file)]) == 0
    assert "Dry run: nothing was trained or written." in capsys.readouterr().out


def test_the_names_on_our_side_are_options():
    known = options("sft") | options("dpo")
    pairs = renamed()
    assert len(pairs) > 30
    for theirs, ours in pairs:
        first = re.findall(r"`(\w+)`", ours)
        if theirs == "stage":
            continue  # the command
        assert (theirs if ours == "the same names" else first[0]) in known, (theirs, ours)


def test_the_tables_agree_with_the_suggestions_of_errors():
    """Each renamed option is suggested for its name in a misspelt command; a note alone has no option."""
    listed = {theirs: ours for theirs, ours in renamed() if ours != "the same names" and theirs != "datasets"}
    assert set(listed) - set(OTHER_NAMES) == set()
    for theirs, ours in listed.items():
        option = OTHER_NAMES[theirs].partition(":")[0]
        assert not option or option in re.findall(r"`(\w+)`", ours), (theirs, ours, option)
