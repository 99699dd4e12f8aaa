"""Telling the options of `accelerate launch` from those of a training script."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trl.scripts.plain_parser import did_you_mean

PROFILES = Path(__file__).parent.parent / "accelerate_configs"
# How the script is run is ours to say.
_RESERVED = {"help", "module", "no_python", "training_script", "training_script_args"}


class Split(NamedTuple):
    """Arguments of the script, and arguments for `accelerate launch`."""

    script: list[str]
    launch: list[str]


def launch_actions() -> dict[str, argparse.Action]:
    """The options of `accelerate launch` by every spelling (`--num_processes`, `--num-processes`)."""
    from accelerate.commands.launch import launch_command_parser

    spellings = launch_command_parser()._option_string_actions
    return {text: action for text, action in spellings.items() if action.dest not in _RESERVED}


def split_arguments(
    argv: Sequence[str], *, script_options: Iterable[str], launch: dict[str, argparse.Action]
) -> Split:
    """Sort the command line: an option that both know belongs to the script.

    `script_options` are the script's options as they are written, dashes included. What neither knows stays with the
    script, whose parser reports it.
    """
    ours = set(script_options)
    result = Split([], [])
    tokens = iter(argv)
    for token in tokens:
        flag, _, inline = token.partition("=")
        if flag in ours or not (flag in launch or is_profile_option(flag)):
            result.script.append(token)
        elif is_profile_option(flag):
            result.launch.extend(["--config_file", profile_path(inline or next(tokens, ""))])
        else:
            result.launch.append(token)
            if not inline and launch[flag].nargs is None:
                result.launch.extend(_value_of(flag, tokens))
    return result


def split_config(
    values: dict[str, Any], *, script_options: Iterable[str], launch: dict[str, argparse.Action]
) -> tuple[dict[str, Any], list[str]]:
    """Sort the options of a config file: the script's own (and unknown ones), and launch arguments."""
    ours = set(script_options)
    script: dict[str, Any] = {}
    arguments: list[str] = []
    for name, value in values.items():
        flag = f"--{name}"
        if flag in ours or not (flag in launch or is_profile_option(flag)):
            script[name] = value
        elif is_profile_option(flag):
            arguments.extend(["--config_file", profile_path(str(value))])
        else:
            arguments.extend(_as_arguments(launch[flag], flag, value))
    return script, arguments


def is_profile_option(flag: str) -> bool:
    """Whether this is `--accelerate_config`."""
    return flag in ("--accelerate_config", "--accelerate-config")


def profile_path(name_or_path: str) -> str:
    """The file of a built-in profile, or the path of the user's own.

    Raises:
        FileNotFoundError: if it is neither, listing the profiles.
    """
    built_in = PROFILES / f"{name_or_path}.yaml"
    if built_in.is_file() and "/" not in name_or_path:
        return str(built_in)
    if Path(name_or_path).is_file():
        return name_or_path
    names = sorted(path.stem for path in PROFILES.glob("*.yaml"))
    raise FileNotFoundError(
        f"accelerate_config must be a profile ({', '.join(names)}) or the path of a file, got {name_or_path!r}."
        f"{did_you_mean(name_or_path, names)}"
    )


def _value_of(flag: str, tokens: Any) -> list[str]:
    value = next(tokens, None)
    if value is None:
        raise ValueError(f"{flag} needs a value.")
    return [value]


def _as_arguments(action: argparse.Action, flag: str, value: Any) -> list[str]:
    """A value from a config file as `accelerate launch` arguments."""
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"`{flag[2:]}` must be true or false, got {value!r}.")
        return [flag] if value else []
    if isinstance(value, bool) and action.choices and "no" in action.choices:
        return [flag, "yes" if value else "no"]  # YAML reads a bare `no` as false
    return [flag, str(value).lower() if isinstance(value, bool) else str(value)]
