"""`trl completion`: the bash script completes commands, options and values; all shells get every command."""

import shutil
import subprocess

import pytest

from trl.cli.main import COMMANDS, main

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The scripts of all shells, with fewer commands: a training command and two plain ones."""
    folder = tmp_path_factory.mktemp("completion")
    with pytest.MonkeyPatch.context() as patch:
        for name in set(COMMANDS) - {"dpo", "env", "completion"}:
            patch.delitem(COMMANDS, name)
        for shell in ("bash", "zsh", "fish"):
            with open(folder / shell, "w") as file:
                patch.setattr("sys.stdout", file)
                assert main(["completion", shell]) == 0
    return folder


def completed(scripts, *words):
    """What bash offers for the last of `words`."""
    code = f'. {scripts / "bash"}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _trl; echo "${{COMPREPLY[@]}}"'
    run = subprocess.run([BASH, "-c", code, "bash", *words], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return run.stdout.split()


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_bash_completes_commands_options_and_values(scripts):
    assert completed(scripts, "trl", "") == ["dpo", "env", "completion"]
    assert completed(scripts, "trl", "d") == ["dpo"]
    assert completed(scripts, "trl", "dpo", "--max_l") == ["--max_length"]
    assert completed(scripts, "trl", "dpo", "--use_peft", "") == ["true", "false"]
    assert completed(scripts, "trl", "dpo", "--use_peft", "--lora_al") == ["--lora_alpha"]
    assert completed(scripts, "trl", "dpo", "--save_strategy", "s") == ["steps"]
    assert completed(scripts, "trl", "dpo", "--accelerate_config", "fs") == ["fsdp1", "fsdp2"]
    assert completed(scripts, "trl", "dpo", "--dataset_name", "x") == []  # bash then offers files
    assert completed(scripts, "trl", "env", "--") == ["--help"]


def test_zsh_and_fish_have_the_same_words(scripts):
    zsh, fish = (scripts / "zsh").read_text(), (scripts / "fish").read_text()
    assert zsh.startswith("#compdef trl\n")
    case = (scripts / "bash").read_text().split("case $command in")[1].split("    esac; fi")[0]
    assert case in zsh
    assert "complete -c trl -n '__fish_seen_subcommand_from dpo' -l use_peft -x -a 'true false'\n" in fish
    assert "-n '__fish_seen_subcommand_from dpo' -l dataset_name -r\n" in fish
    assert "complete -c trl -f -n __fish_use_subcommand -a env -d 'print versions" in fish


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "the shell must be bash, zsh or fish, got 'tcsh'" in capsys.readouterr().err
