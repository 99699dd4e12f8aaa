"""Shell completion: `trl completion bash` (zsh, fish) prints a script that holds all commands and options."""

import argparse
import importlib
import shlex
from collections.abc import Iterator, Sequence

from trl.scripts.plain_parser import PlainParser

DESCRIPTION = """\
Print a completion script. It is static: completing runs no Python. Load it when a shell starts:

  bash   trl completion bash > ~/.local/share/bash-completion/completions/trl
  zsh    trl completion zsh > ~/.trl-completion.zsh; echo 'source ~/.trl-completion.zsh' >> ~/.zshrc
  fish   trl completion fish > ~/.config/fish/completions/trl.fish
"""
SHELLS = ("bash", "zsh", "fish")
# zsh runs bash's functions, with bash's arrays and words (`bashcompinit` is part of it).
_ZSH = (
    "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }\nautoload -Uz bashcompinit && bashcompinit\n"
)
_BASH = """\
_trl() {{
    local command=${{COMP_WORDS[1]}} cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} found=""
    if (( COMP_CWORD == 1 )); then found="{commands}"; else case $command in
{cases}
    esac; fi
    COMPREPLY=($(compgen -W "$found" -- "$cur"))
}}
complete -o default -F _trl trl
"""


def make_parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = PlainParser(prog="trl completion", description=DESCRIPTION, formatter_class=layout)
    parser.add_argument("shell", metavar="{bash,zsh,fish}", help="shell to print the script for")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    from trl.cli.main import COMMANDS

    parser = make_parser()
    shell = parser.parse_args(argv).shell
    if shell not in SHELLS:
        parser.error(f"the shell must be one of {', '.join(SHELLS)}, got {shell!r}.")
    options = {name: command_options(command.module) for name, command in COMMANDS.items()}
    if shell == "fish":
        print("\n".join(_fish(options)))
        return 0
    cases = "\n".join(_case(name, of_command) for name, of_command in options.items())
    print((_ZSH if shell == "zsh" else "") + _BASH.format(commands=" ".join(options), cases=cases), end="")
    return 0


def _fish(options: dict[str, dict[str, list[str] | None]]) -> Iterator[str]:
    """The lines of the script for fish: -f offers no files, -x wants one of the values, -r any value or file."""
    yield f"complete -c trl -n __fish_use_subcommand -f -a {shlex.quote(' '.join(options))}"
    for command, of_command in options.items():
        for flag, values in of_command.items():
            kind = "" if values is None else f" -x -a {shlex.quote(' '.join(values))}" if values else " -r"
            yield f"complete -c trl -n '__fish_seen_subcommand_from {command}' -l {flag[2:]}{kind}"


def command_options(module: str) -> dict[str, list[str] | None]:
    """The options of a command, with the values of each: [] for anything (files are offered), None for a flag."""
    from trl.cli.launch import PROFILES

    spellings = importlib.import_module(module).make_parser()._option_string_actions
    options: dict[str, list[str] | None] = {}
    if "--per_device_train_batch_size" in spellings:  # the options of `accelerate launch` that many runs need
        options["--accelerate_config"] = sorted(path.stem for path in PROFILES.glob("*.yaml"))
        options["--num_processes"] = []
    for flag, action in spellings.items():
        underscored = "--" + flag[2:].replace("-", "_")
        if flag.startswith("--") and (flag == underscored or underscored not in spellings):
            options[flag] = None if action.nargs == 0 else _values(action)
    return dict(sorted(options.items()))


def _values(action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return list(dict.fromkeys(str(choice).lower() for choice in action.choices))
    return ["true", "false"] if getattr(action.type, "__name__", "") == "string_to_bool" else []


def _case(command: str, options: dict[str, list[str] | None]) -> str:
    """What a command offers after each of its options, as `case` branches."""
    after: dict[str, list[str]] = {}
    for flag, values in options.items():
        if values:
            after.setdefault(" ".join(values), []).append(flag)
    branches = [f'            {"|".join(flags)}) found="{values}" ;;' for values, flags in after.items()]
    every = f'            *) if [[ $cur == -* ]]; then found="{" ".join(options)}"; fi ;;'
    offered = '[[ $cur == -* ]] && prev=""'
    return "\n".join([f"        {command}) {offered}; case $prev in", *branches, every, "        esac ;;"])
