"""Every recipe of `examples/recipes` is a file of the command that its first line names, and dry-runs on a small model."""

import importlib
import json
import shlex
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl.cli.launch import make_plan
from trl.cli.main import COMMANDS
from trl.scripts.config_file import read_config, take_config_option
from trl.scripts.running import run_script

RECIPES = sorted((Path(__file__).resolve().parents[2] / "examples" / "recipes").glob("*.yaml"))
ROWS = {
    "sft": {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Seven apples."}]},
    "kto": {"prompt": "Q: How many?", "completion": " Seven.", "label": True},
    "pairs": {"prompt": "Q: How many?", "chosen": " Seven apples.", "rejected": " Next."},
    "prompts": {"prompt": "How many apples are left?", "solution": "7"},
}
NOT_HERE = {
    "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "optim", "attn_implementation", "accelerate_config",
    "num_processes", "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization",
}  # fmt: skip
KIND = {"sft": "sft", "kto": "kto", "reward": "pairs", "dpo": "pairs"}


def command_of(recipe: Path) -> tuple[str, list[str]]:
    """The command and its words, from the first line."""
    program, name, *words = shlex.split(recipe.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "))
    assert program == "trl"
    return name, words


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_options_that_exist(recipe, monkeypatch):
    monkeypatch.chdir(recipe.parents[2])
    name, words = command_of(recipe)
    parser = importlib.import_module(COMMANDS[name].module).make_parser()
    path, words = take_config_option(words)
    assert path == f"examples/recipes/{recipe.name}"
    plan = make_plan(parser, words, read_config(path))
    parser.check_arguments(plan.script, plan.config)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, model_path):
    """A folder with rows of each kind and a reward model, read once by all recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    for kind, row in ROWS.items():
        (folder / kind).mkdir()
        for split in ("train", "test"):
            (folder / kind / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 8)
    scorer = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    scorer.save_pretrained(folder / "scorer")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(folder / "scorer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
        yield folder


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_dry_runs(recipe, tmp_path, model_path, workshop, capsys):
    """With its own settings, but those that need a GPU or the Hub: model, data, 4 bits, kernels, vLLM, launch."""
    name, _ = command_of(recipe)
    settings = {key: value for key, value in yaml.safe_load(recipe.read_text()).items() if key not in NOT_HERE}
    local = {
        "model_name_or_path": model_path,
        "dataset_name": str(workshop / KIND.get(name, "prompts")),
        "output_dir": str(tmp_path / "out"),
    }
    models = dict.fromkeys(("teacher_model_name_or_path", "chat_template_path"), model_path)
    models["reward_model_name_or_path"] = str(workshop / "scorer")
    local |= {name: path for name, path in models.items() if name in settings}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**settings, **local, "dry_run": True, "use_cpu": True, "report_to": "none"}))
    module = importlib.import_module(COMMANDS[name].module)
    assert run_script(module.make_parser(), module.main, ["--config", str(file)]) == 0
    assert "Dry run: nothing was trained or written." in capsys.readouterr().out
