"""`TrlParser`: dataclasses from the command line, with defaults from a YAML file."""

import argparse
import dataclasses
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import DataClass, DataClassType

from trl.options.checks import KIND_NAMES, declaration, from_text
from trl.options.spelling import did_you_mean
from trl.scripts.config_file import ConfigFile, read_config, take_config_option
from trl.scripts.plain_parser import PlainParser, unknown_arguments


class TrlParser(PlainParser, HfArgumentParser):
    """Parse dataclasses from command-line arguments and a YAML file given with `--config`.

    Options of the file are defaults, which the command line overrides; its `env:` mapping sets environment variables.
    With subparsers (`add_subparsers`) they are also defaults of the command that the arguments name, or of all. All
    faults of a file are reported at once. Options must be written out in full. `dataclass_types` have no field `config`
    and share none. `other_options` are names that others read from the same command line: they are suggested too.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Options:
        ...     rate: float = 1.0
        >>> TrlParser(Options).parse_args_and_config(["--rate", "2"])
        (Options(rate=2.0),)
    """

    def __init__(self, dataclass_types: DataClassType | Iterable[DataClassType] | None = None, **kwargs: Any) -> None:
        types = [] if dataclass_types is None else dataclass_types
        kinds: list[Any] = list(types) if isinstance(types, Iterable) else [types]
        for kind in kinds:
            if "config" in {field.name for field in dataclasses.fields(kind)}:
                raise ValueError(f"{kind.__name__} has a field `config`, the parser's own. Rename it.")
        kwargs.setdefault("formatter_class", OptionHelp)
        super().__init__(kinds, **kwargs)
        self.other_options: set[str] = set()
        self._hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
        text = "YAML file with options; those given on the command line win"
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)

    def parse_args_and_config(
        self, args: Iterable[str] | None = None, return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[DataClass, ...]:  # fmt: skip
        """One instance per dataclass, from `args` (those of the process if None) and the file that they name.

        Unknown options are an error, or a warning without `fail_with_unknown_args`; with `return_remaining_strings`
        they come last, as a list of strings. Raises: ValueError, FileNotFoundError, SystemExit for wrong types.
        """
        path, words = take_config_option(list(sys.argv[1:] if args is None else args))
        config = None if path is None else read_config(path)
        if config is not None:
            config.apply_env()
        if not return_remaining_strings:
            return self.parse_with(words, config, fail_with_unknown_args=fail_with_unknown_args)
        from_file, faults = self._take_defaults(config, words)
        _raise_all(faults)
        return (*self._build(words, config), [*from_file, *self.parse_known_args(words)[1]])

    def parse_with(
        self, args: list[str], config: ConfigFile | None, *, fail_with_unknown_args: bool = True
    ) -> tuple[DataClass, ...]:
        """`parse_args_and_config` with a config file that has been read already."""
        self.check_arguments(args, config, fail_with_unknown_args=fail_with_unknown_args)
        return self._build(args, config)

    def check_arguments(
        self, args: list[str], config: ConfigFile | None, *, fail_with_unknown_args: bool = True
    ) -> None:
        """Take the file's options as defaults and check names and types of all options; build no dataclass."""
        from_file, faults = self._take_defaults(config, args)
        options = [name for reader in self._readers([]) for name in options_of(reader)]
        known = [*options, "config", "help", *sorted(self.other_options)]
        names = [token[2:] for token in from_file if token.startswith("--")]
        where = str if config is None else config.where
        messages = [f"{where(name)}: unknown option `{name}`.{did_you_mean(name, known)}" for name in names]
        messages += unknown_arguments(self.unknown(args), known)
        _raise_all([*faults, *messages] if fail_with_unknown_args else faults)
        if messages:
            warnings.warn("Ignored: " + " ".join(messages), stacklevel=3)
        self.parse_known_args(args)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)  # type: ignore[misc]
        except argparse.ArgumentError as error:
            if action.type in KIND_NAMES:
                error.message = f"must be {KIND_NAMES[action.type]}, got {arg_string!r}."
            raise

    def _take_defaults(self, config: ConfigFile | None, args: list[str]) -> tuple[list[str], list[str]]:
        """Take the file's options as defaults; returns the unknown ones as strings, and the faults of the others."""
        if config is None:
            return [], []
        remaining, faults = [], [*config.faults]
        readers = self._readers(args)
        for name, value in config.values.items():
            knowing = [reader for reader in readers if name in options_of(reader)]
            if not knowing:
                items = value if isinstance(value, list) else [value]
                remaining.extend([f"--{name}", *map(str, items)])
            for reader in knowing:
                action = options_of(reader)[name]
                try:
                    default = _option_value(action, value, hint=getattr(reader, "_hints", {}).get(name))
                except ValueError as error:
                    faults.append(f"{config.where(name)}: `{name}` {error}".removeprefix(": "))
                    continue
                action.required = False
                reader.set_defaults(**{name: default})
        return remaining, list(dict.fromkeys(faults))

    def _build(self, args: list[str], config: ConfigFile | None) -> tuple[DataClass, ...]:
        namespace, _ = self.parse_known_args(args)
        built: list[Any] = []
        values, errors = vars(namespace), []
        for kind in self.dataclass_types:
            names = [item.name for item in dataclasses.fields(kind) if item.init]
            try:
                built.append(kind(**{name: values.pop(name) for name in names}))
            except (ValueError, TypeError) as error:
                option = re.match(r"(\w+)(\[\d+\])?", str(error))
                is_given = option is not None and any(word.split("=")[0] == f"--{option[1]}" for word in args)
                if config is not None and option is not None and not is_given and option[0] in config.lines:
                    named = TypeError if isinstance(error, TypeError) else ValueError
                    error = named(f"{config.where(option[0])}: {error}")
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        _raise_all([str(error) for error in errors])
        if values:
            built.append(namespace)
        return tuple(built)

    def set_defaults_with_config(self, **kwargs: object) -> list[str]:
        """Make values the defaults of options; returns unknown ones as words. Raises: ValueError for misfits."""
        remaining, faults = self._take_defaults(ConfigFile("", kwargs, {}, {}), [])
        _raise_all(faults)
        return remaining

    def _readers(self, args: list[str]) -> list[argparse.ArgumentParser]:
        """This parser and its subparsers: the one that `args` names, or all where it names none."""
        readers: list[argparse.ArgumentParser] = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                named = [token for token in args if token in action.choices][:1]
                readers.extend(action.choices[name] for name in named or action.choices)
        return readers

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in sections(self._actions, self.dataclass_types).items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every option by the name of its field."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.option_strings and action.dest not in ("help", "config"):
            actions.setdefault(action.dest, action)
    return actions


def _raise_all(faults: list[str]) -> None:
    if faults:
        raise ValueError("\n".join(faults))


def _option_value(action: argparse.Action, value: object, *, hint: object = None) -> object:
    """`value` in the type of the option `action`; `hint` is that of its field. Raises: ValueError for others.

    Text becomes a number (YAML reads `2e-5` as text), a mapping `key=value` items, entries of a list dataclasses.
    """
    if value is None:
        return None
    if action.nargs in ("+", "*"):
        if isinstance(value, dict) and action.type is str:
            return [f"{key}={item}" for key, item in value.items()]
        return [_single(action, item) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, (dict, list)):
        members = (hint,) if get_origin(hint) in (dict, list) else (*get_args(hint), hint)
        if hint is None or type(value) in {get_origin(member) or member for member in members}:
            return value
        raise ValueError(f"must be {KIND_NAMES.get(action.type, 'a plain value')}, got {value!r}.")
    return _single(action, value)


def _single(action: argparse.Action, value: object) -> object:
    kind, choices = action.type, action.choices
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return value if isinstance(value, dict) else kind(value)  # type: ignore[call-arg]
    if isinstance(value, bool) and "no" in (choices or ()):
        value = "yes" if value else "no"  # YAML reads a bare `no` as false
    if choices is not None:
        plain, words = getattr(value, "value", value), [str(choice) for choice in choices]
        if plain in choices:
            return plain
        near = did_you_mean(str(value), words)
        raise ValueError(f"must be one of {', '.join(words)}; got {value!r}.{near}")
    if not isinstance(value, str) and kind not in KIND_NAMES:
        return value
    return from_text(kind, str(value).lower() if isinstance(value, bool) else str(value))


# --- the help text: options in groups, the essential ones first

ESSENTIAL = (
    *("model_name_or_path", "dataset_name", "output_dir", "config", "dry_run", "reward_funcs", "learning_rate"),
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length"),
    *("max_completion_length", "num_generations", "loss_type", "beta", "use_peft", "eval_strategy"),
    *("resume_from_checkpoint", "help"),
)  # fmt: skip
MODEL, DATA, TRAINING, METHOD, GENERATION = "model", "data", "training", "method", "generation"
LOGGING, HARDWARE, OLDER = "logging, evaluation and saving", "hardware and speed", "older names"
_ORDER = ("essential", MODEL, DATA, TRAINING, METHOD, GENERATION, LOGGING, HARDWARE, OLDER)
# The module that first declares a field -> its group. Other modules of the library declare what belongs to a method.
_OF_MODULE = {
    "trl.options.model": MODEL, "trl.options.training": DATA, "trl.data.sources": DATA, "trl.scripts.arguments": DATA,
    "transformers.training_args": TRAINING, "trl.options.generation": GENERATION,
}  # fmt: skip
# Exceptions by name, for modules that declare fields of several groups.
_MIXED = (
    *("transformers.training_args", "trl.scripts.arguments", "trl.options.shared", "trl.options.training"),
    *("trl.trainer.sft_config", "trl.trainer.ppo_config"),
)
_LOGGING_NAMES = (
    r"(log|logging|eval|batch_eval|save|hub|trackio|include|resume|restore|checkpoint)_.*|report_to|run_name|project|push_to_hub"
    r"|disable_tqdm|load_best.*|metric_for.*|greater_.*|prediction_.*|.*_eval_batch_size|enable_jit.*|ignore_data.*"
)
_HARDWARE_NAMES = (
    r"(bf16|fp16|tf32|torch|(gradient|activation)_checkpointing|liger|ddp|fsdp|dataloader|accelerator|parallelism)(_.*)?|deepspeed"
    r"|use_(cpu|cache|liger_kernel)|auto_find.*|full_determinism|local_rank|debug|skip_memory.*|ignore_bias_buffers"
    r"|activation_offloading"
)
_OF_NAME = {
    MODEL: r".*model_name_or_path|model_init_kwargs",
    METHOD: r"dialogue_marker",
    DATA: r"dataset_(text|kwargs|num).*|.*packing.*|padding_free|shuffle_dataset|max_.*length|pad_.*|eos_token"
    r"|chat_template_path",
    GENERATION: r"response_length|stop_token.*|temperature|missing_eos_penalty|local_rollout.*|ds3_.*",
    LOGGING: _LOGGING_NAMES,
    HARDWARE: _HARDWARE_NAMES,
}


def sections(actions: Iterable[argparse.Action], kinds: Iterable[type]) -> dict[str, list[argparse.Action]]:
    """A parser's options by the titles of their groups, without `--no_x` beside a switch `--x`."""
    groups = {field: _group(kind, field) for kind in kinds for field in getattr(kind, "__dataclass_fields__", {})}
    titles: dict[str, list[argparse.Action]] = {}
    if any(base.__module__ == "transformers.training_args" for kind in kinds for base in kind.__mro__):
        titles = {title: [] for title in _ORDER}
        groups |= dict.fromkeys(ESSENTIAL, _ORDER[0])
    else:
        groups = dict.fromkeys(groups, "options")
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._StoreFalseAction):
            continue
        title = groups.get(action.dest, "options") if action.option_strings else "arguments"
        titles.setdefault(title, []).append(action)
    if _ORDER[0] in titles:
        titles[_ORDER[0]].sort(key=lambda action: ESSENTIAL.index(action.dest))
    return titles


def _group(kind: type, field: str) -> str:
    item: dataclasses.Field = kind.__dataclass_fields__[field]  # pyright: ignore
    if str(item.metadata.get("help")).startswith("Deprecated"):
        return OLDER
    owner = next(base for base in reversed(kind.__mro__) if field in vars(base).get("__annotations__", {}))
    module = declaration(item).module or owner.__module__
    if module in _MIXED:
        for title, pattern in _OF_NAME.items():
            if re.fullmatch(pattern, field):
                return title
    ours = module.partition(".")[0] == "trl"
    return _OF_MODULE.get(module, METHOD if ours else f"options of {owner.__name__}")


class OptionHelp(argparse.HelpFormatter):
    """One spelling for each option, the kind of its value, its help below it, and its default where it has one."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=6, **kwargs)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        plain = list(dict.fromkeys(text[:2] + text[2:].replace("-", "_") for text in action.option_strings))
        values = "" if action.nargs == 0 else " " + self._format_args(action, self._kind(action))
        return ", ".join(plain) + values

    def _kind(self, action: argparse.Action) -> str:
        kinds = {int: "INT", float: "FLOAT", "string_to_bool": "true|false"}
        kind = kinds.get(action.type) or kinds.get(getattr(action.type, "__name__", ""))  # pyright: ignore
        return kind or ("PATH" if re.search(r"(dir|path|file|folder)$", action.dest) else "TEXT")

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if action.metavar is None and action.choices:
            names = dict.fromkeys(str(choice).lower() for choice in action.choices)
            shown = "NAME" if self._has_many_choices(action) else f"{{{','.join(names)}}}"
            return lambda size: (shown,) * size
        return super()._metavar_formatter(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = (action.help or "").rstrip()
        if self._has_many_choices(action):
            text += f" One of {', '.join(map(str, action.choices or ()))}."
        if action.default in (None, argparse.SUPPRESS, "") or action.nargs == 0:
            return text
        default = getattr(action.default, "value", action.default)
        return f"{text} (default: {str(default).lower() if isinstance(default, bool) else '%(default)s'})"

    @staticmethod
    def _has_many_choices(action: argparse.Action) -> bool:
        return len(",".join(map(str, action.choices or ()))) > 40
