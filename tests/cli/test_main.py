import json
import subprocess
import sys

import pytest

from trl import GRPOConfig
from trl.cli import main as entry_point
from trl.cli.main import COMMANDS, Command, main


def test_the_overview_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and command.help in text for name, command in COMMANDS.items())
    assert {"sft", "env", "quickstart"} <= set(COMMANDS)
    assert entry_point is main


def test_no_command_prints_the_overview_and_fails(capsys):
    assert main([]) == 2
    assert "usage: trl" in capsys.readouterr().out


def test_unknown_commands_suggest_the_nearest(capsys):
    assert main(["stf"]) == 2
    assert "Did you mean trl sft?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("ppo", "run examples/scripts/ppo/ppo.py, or build PPOTrainer (docs/methods/ppo_dataset.md)"),
        ("ddpo", "run examples/scripts/ddpo.py"),
        ("iterative_sft", "build IterativeSFTTrainer"),
        ("gspo", "use trl grpo with --loss_type"),
    ],
)
def test_methods_without_a_command_name_what_to_run(name, way, capsys):
    assert main([name]) == 2
    assert f"trl: error: {name} has no command: {way}" in capsys.readouterr().err


def test_every_method_has_a_command_or_a_way():
    """Of the trainers in `trl` and `trl.experimental`; what the messages name is there."""
    from pathlib import Path

    import trl
    from trl.cli.main import _ELSEWHERE, _OTHER_NAMES

    root = Path(__file__).parents[2]
    commands = {name.replace("-", "") for name in {**COMMANDS, **_ELSEWHERE, **_OTHER_NAMES}}
    folders = [path.name for path in (root / "src/trl/experimental").iterdir() if (path / "__init__.py").is_file()]
    packages = {"agents", "bema_for_ref_model", "grpo_with_replay_buffer"}
    methods = {name.removesuffix("Trainer").lower() for name in trl.__all__ if name.endswith("Trainer")}
    methods |= {name.replace("_", "") for name in set(folders) - packages}
    assert methods - {"ppov2", "base"} <= commands, methods - commands
    for way in _ELSEWHERE.values():
        for word in way.replace("(", " ").replace(")", " ").replace(",", " ").split():
            assert "/" not in word or (root / word).is_file(), word


@pytest.mark.parametrize(("name", "said"), [("sft", "interrupted, no step was trained."), ("env", "interrupted.")])
def test_an_interruption_while_modules_are_imported(name, said, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupt)
    assert main([name]) == 130
    assert capsys.readouterr().err == f"trl {name}: {said}\n"


def test_the_forks_names_of_a_served_vllm(capsys, tmp_path):
    assert main(["vllm-serve-async", "--help"]) == 0
    assert "trl vllm-serve --model" in capsys.readouterr().out
    assert GRPOConfig(str(tmp_path), use_vllm=True, vllm_mode="async_server").vllm_mode == "server"
    with pytest.raises(ValueError, match="vllm_mode"):
        GRPOConfig(str(tmp_path), use_vllm=True, vllm_mode="async")


def test_plain_commands_return_their_status(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "toy", Command("trl.scripts.env", "versions"))
    assert main(["toy"]) == 0
    assert "TRL version" in capsys.readouterr().out
    assert main(["toy", "--nonsense"]) == 2


def test_help_imports_no_torch():
    code = (
        "import sys; sys.argv = ['trl', '--help']; from trl.cli import main; status = main(); "
        "heavy = [m for m in ('torch', 'transformers', 'datasets', 'accelerate') if m in sys.modules]; "
        "print(heavy); sys.exit(status)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (answer.returncode, answer.stdout.splitlines()[-1]) == (0, "[]"), answer.stderr


@pytest.mark.slow
def test_help_of_sft_lists_options_and_stays_light():
    """Like every command it has no bars without a terminal."""
    code = (
        "import sys, json; sys.argv = ['trl', 'sft', '--help']; from trl.cli import main; status = main(); "
        "print(json.dumps([m for m in ('peft', 'sklearn', 'trl.trainer.sft_trainer') if m in sys.modules])); "
        "import datasets; from transformers.utils import logging; "
        "print(datasets.are_progress_bars_disabled(), logging.is_progress_bar_enabled()); sys.exit(status)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 0, answer.stderr
    for option in (
        "--model_name_or_path",
        "--max_length",
        "--column_mapping",
        "--config FILE",
        "--accelerate_config",
    ):
        assert option in answer.stdout
    *_, heavy, bars = answer.stdout.splitlines()
    assert json.loads(heavy) == [] and bars == "True False"
