"""Shell completion: `trl completion bash`, `zsh` or `fish` prints a script that holds all commands and options."""

import argparse
import importlib
import shlex
from collections.abc import Sequence

from trl.scripts.plain_parser import PlainParser

DESCRIPTION = """\
Print a completion script. It is static: completing runs no Python. Load it when a shell starts:

  bash   trl completion bash > ~/.local/share/bash-completion/completions/trl
  zsh    trl completion zsh > ~/.zfunc/_trl      (a folder in fpath, before compinit)
  fish   trl completion fish > ~/.config/fish/completions/trl.fish
"""
# In both shells: command, previous word, current word and position in; the candidates in `found` out, none: files.
_POSIX = """\
    if (( at == 1 )); then found="{commands}"; else case $command in
{cases}
    esac; fi
"""
_BASH = """\
_trl() {{
    local command=${{COMP_WORDS[1]}} cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} at=$COMP_CWORD found=""
{body}    COMPREPLY=($(compgen -W "$found" -- "$cur"))
}}
complete -o default -F _trl trl
"""
_ZSH = """\
#compdef trl
_trl() {{
    local command=${{words[2]}} cur=${{words[CURRENT]}} prev=${{words[CURRENT-1]}} at=$((CURRENT-1)) found=""
{body}    if [[ -n $found ]]; then compadd -- ${{=found}}; else _files; fi
}}
if [[ $funcstack[1] == _trl ]]; then _trl "$@"; else compdef _trl trl; fi
"""


def make_parser() -> argparse.ArgumentParser:
    """The options of `trl completion`."""
    parser = PlainParser(
        prog="trl completion",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", metavar="{bash,zsh,fish}", help="shell to print the script for")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script for a shell; returns the exit status."""
    from trl.cli.main import COMMANDS

    parser = make_parser()
    shell = parser.parse_args(argv).shell
    if shell not in ("bash", "zsh", "fish"):
        parser.error(f"the shell must be bash, zsh or fish, got {shell!r}.")
    options = {name: command_options(command.module) for name, command in COMMANDS.items()}
    if shell == "fish":
        print(fish_script(options, {name: command.help for name, command in COMMANDS.items()}), end="")
        return 0
    cases = "\n".join(_posix_case(name, of_command) for name, of_command in options.items())
    body = _POSIX.format(commands=" ".join(options), cases=cases)
    print({"bash": _BASH, "zsh": _ZSH}[shell].format(body=body), end="")
    return 0


def command_options(module: str) -> dict[str, list[str] | None]:
    """The options of a command, with the values of each: [] for anything (files are offered), None for a flag."""
    from trl.cli.launch_options import PROFILES

    spellings = importlib.import_module(module).make_parser()._option_string_actions
    found: dict[str, list[str] | None] = {}
    if "--per_device_train_batch_size" in spellings:  # the options of `accelerate launch` that many runs need
        found["--accelerate_config"] = sorted(path.stem for path in PROFILES.glob("*.yaml"))
        found["--num_processes"] = []
    for flag, action in spellings.items():
        underscored = "--" + flag[2:].replace("-", "_")
        if flag.startswith("--") and (flag == underscored or underscored not in spellings):
            found[flag] = None if action.nargs == 0 else _values(action)
    return dict(sorted(found.items()))


def _values(action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return list(dict.fromkeys(str(choice).lower() for choice in action.choices))
    return ["true", "false"] if getattr(action.type, "__name__", "") == "string_to_bool" else []


def _posix_case(command: str, options: dict[str, list[str] | None]) -> str:
    """What a command offers after each of its options, as `case` branches for bash and zsh."""
    after: dict[str, list[str]] = {}
    for flag, values in options.items():
        if values:
            after.setdefault(" ".join(values), []).append(flag)
    branches = [f'            {"|".join(flags)}) found="{values}" ;;' for values, flags in after.items()]
    every = f'            *) if [[ $cur == -* ]]; then found="{" ".join(options)}"; fi ;;'
    offered = '[[ $cur == -* ]] && prev=""'
    return "\n".join([f"        {command}) {offered}; case $prev in", *branches, every, "        esac ;;"])


def fish_script(options: dict[str, dict[str, list[str] | None]], helps: dict[str, str]) -> str:
    """The script for fish: one line for each command and option."""
    lines = []
    for command, of_command in options.items():
        lines.append(
            f"complete -c trl -f -n __fish_use_subcommand -a {command} -d {shlex.quote(helps[command])}"
        )
        for flag, values in of_command.items():
            takes = "" if values is None else f" -x -a {shlex.quote(' '.join(values))}" if values else " -r"
            lines.append(f"complete -c trl -n '__fish_seen_subcommand_from {command}' -l {flag[2:]}{takes}")
    return "\n".join(lines) + "\n"
