"""Reading a YAML file of options. Imports nothing heavy: the command line reads it before anything else."""

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class ConfigFile:
    """A YAML file's options, the line of each, its environment variables, and messages on what is wrong in it."""

    path: str
    values: dict[str, object]
    lines: dict[str, int]
    env: dict[str, str]
    faults: tuple[str, ...] = ()

    def where(self, key: str) -> str:
        """`file, line n` of an option."""
        return f"{self.path}, line {self.lines[key]}" if key in self.lines else self.path

    def apply_env(self) -> None:
        """Set the environment variables of the file in this process (and so in those that it starts)."""
        os.environ.update(self.env)


def read_config(path: str) -> ConfigFile:
    """The options of a YAML file, plain values only. Raises: FileNotFoundError, ValueError for no valid mapping."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"The config file {path} does not exist. Check the path given with --config.")
    text = Path(path).read_text(encoding="utf-8")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return ConfigFile(path, {}, {}, {})
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold `option: value` lines, got {type(values).__name__}.")
    lines, faults = _lines(path, node)
    env = values.pop("env", None) or {}
    if not isinstance(env, dict) or any(isinstance(value, (dict, list)) for value in env.values()):
        faults.append(f"{path}: `env` must map names of environment variables to plain values, got {env!r}.")
        env = {}
    plain = {str(name): "" if value is None else str(value) for name, value in env.items()}
    return ConfigFile(path, values, lines, plain, tuple(faults))


class YamlConfigParser:
    """`read_config` as programs of 0.8-0.11 call it."""

    def parse_and_set_env(self, config_path: str) -> dict[str, object]:
        """The options of the file; its environment variables are set in this process."""
        config = read_config(config_path)
        config.apply_env()
        return config.values

    def to_string(self, config: Mapping[str, object]) -> str:
        """The options as they are written on a command line, without those that are None or empty lists."""
        words: list[str] = []
        for name, value in config.items():
            values = value if isinstance(value, list) else [] if value is None else [value]
            words += [f"--{name}", *map(str, values)] if values else []
        return shlex.join(words)


def _lines(path: str, node: Any) -> tuple[dict[str, int], list[str]]:
    """The line of each option and of each entry of a list (`name[0]`), and messages for names that stand twice."""
    lines: dict[str, int] = {}
    faults = []
    for key, value in node.value:
        line = key.start_mark.line + 1
        if (before := lines.get(key.value)) is not None:
            faults.append(f"{path}, line {line}: `{key.value}` already stands on line {before}. Keep one of them.")
        lines.setdefault(key.value, line)
        entries = value.value if isinstance(value, yaml.SequenceNode) else []
        lines |= {f"{key.value}[{i}]": entry.start_mark.line + 1 for i, entry in enumerate(entries)}
    return lines, faults


def take_config_option(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """The path given with `--config` (or None), and the other arguments. Raises: ValueError for none or two paths."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", nargs="?", const="", default=[])
    options, rest = parser.parse_known_args(args)
    if len(paths := options.config) > 1:
        raise ValueError(f"--config is given {len(paths)} times ({', '.join(paths)}). Give one file.")
    if "" in paths:
        raise ValueError("--config needs the path of a YAML file.")
    return (paths[0] if paths else None), rest
