"""`trl completion`: the bash script completes commands, options and values."""

import shutil
import subprocess

import pytest

from trl.cli.main import COMMANDS, main

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script for fewer commands: a training command and two plain ones."""
    path = tmp_path_factory.mktemp("completion") / "bash"
    with pytest.MonkeyPatch.context() as patch, open(path, "w") as file:
        for name in set(COMMANDS) - {"dpo", "env", "completion"}:
            patch.delitem(COMMANDS, name)
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


def completed(script, *words):
    """What bash offers for the last of `words`."""
    code = f'. {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _trl; echo "${{COMPREPLY[@]}}"'
    run = subprocess.run([BASH, "-c", code, "bash", *words], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return run.stdout.split()


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_bash_completes_commands_options_and_values(script):
    assert completed(script, "trl", "") == ["dpo", "env", "completion"]
    assert completed(script, "trl", "d") == ["dpo"]
    assert completed(script, "trl", "dpo", "--max_l") == ["--max_length"]
    assert completed(script, "trl", "dpo", "--use_peft", "") == ["true", "false"]
    assert completed(script, "trl", "dpo", "--use_peft", "--lora_al") == ["--lora_alpha"]
    assert completed(script, "trl", "dpo", "--save_strategy", "s") == ["steps"]
    assert completed(script, "trl", "dpo", "--accelerate_config", "fs") == ["fsdp1", "fsdp2"]
    assert completed(script, "trl", "dpo", "--dataset_name", "x") == []  # bash then offers files
    assert completed(script, "trl", "env", "--") == ["--help"]


@pytest.fixture
def printed(monkeypatch, capsys):
    """The scripts of all shells for `trl dpo` and `trl env`."""
    from trl.scripts import completion

    for name in set(COMMANDS) - {"dpo", "env"}:
        monkeypatch.delitem(COMMANDS, name)
    scripts = {}
    for shell in completion.SHELLS:
        assert completion.main([shell]) == 0
        scripts[shell] = capsys.readouterr().out
    return scripts


def test_zsh_runs_the_functions_of_bash(printed):
    head, separator, rest = printed["zsh"].partition("_trl() {")
    assert "bashcompinit" in head and separator + rest == printed["bash"]


def test_fish_completes_commands_options_and_values(printed):
    lines = printed["fish"].splitlines()
    assert lines[0] == "complete -c trl -n __fish_use_subcommand -f -a 'dpo env'"
    dpo = "complete -c trl -n '__fish_seen_subcommand_from dpo' -l "
    assert f"{dpo}use_peft -x -a 'true false'" in lines
    assert f"{dpo}dataset_name -r" in lines
    assert "complete -c trl -n '__fish_seen_subcommand_from env' -l help" in lines


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shells_own_check_of_the_syntax(shell, printed, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    path = tmp_path / shell
    path.write_text(printed[shell])
    subprocess.run([shell, "-n", str(path)], check=True)


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "the shell must be one of bash, zsh, fish, got 'tcsh'" in capsys.readouterr().err
