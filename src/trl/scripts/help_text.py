"""`--help` of parsers with many options: in groups, the essential options first. Imports nothing heavy."""

import argparse
import re
from collections.abc import Iterable
from typing import Any

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
    "trl.options.model": MODEL,
    "trl.options.training": DATA,
    "trl.data.mixtures": DATA,
    "trl.scripts.arguments": DATA,
    "transformers.training_args": TRAINING,
    "trl.options.generation": GENERATION,
}
# Exceptions by name, for modules that declare fields of several groups.
_MIXED = (
    *("transformers.training_args", "trl.scripts.arguments", "trl.options.shared", "trl.options.training"),
    *("trl.trainer.sft_config", "trl.trainer.on_policy_config"),
)
_LOGGING_NAMES = (
    r"(log|logging|eval|batch_eval|save|hub|trackio|include|resume|restore)_.*|report_to|run_name|project|push_to_hub"
    r"|disable_tqdm|load_best.*|metric_for.*|greater_.*|prediction_.*|.*_eval_batch_size|enable_jit.*|ignore_data.*"
)
_HARDWARE_NAMES = (
    r"(bf16|fp16|tf32|torch|gradient_checkpointing|liger|ddp|fsdp|dataloader|accelerator|parallelism)(_.*)?|deepspeed"
    r"|use_(cpu|cache|liger_kernel)|auto_find.*|full_determinism|local_rank|debug|skip_memory.*|ignore_bias_buffers"
    r"|activation_offloading"
)
_OF_NAME = {
    MODEL: r".*model_name_or_path|model_init_kwargs",
    METHOD: r"dialogue_marker",
    DATA: r"dataset_(text|kwargs|num).*|.*packing.*|padding_free|shuffle_dataset|max_.*length|pad_.*|eos_token|chat_template_path",
    GENERATION: r"response_length|stop_token.*|temperature|missing_eos_penalty|local_rollout.*|ds3_.*",
    LOGGING: _LOGGING_NAMES,
    HARDWARE: _HARDWARE_NAMES,
}


def sections(actions: Iterable[argparse.Action], kinds: Iterable[type]) -> dict[str, list[argparse.Action]]:
    """The options of a parser under the titles of their groups; those of a training command in eight groups.

    `kinds` are the dataclasses whose fields the options are. `--no_x` beside a switch `--x` is left out.
    """
    groups = {
        field: _group(kind, field) for kind in kinds for field in getattr(kind, "__dataclass_fields__", {})
    }
    found: dict[str, list[argparse.Action]] = {}
    if any(base.__module__ == "transformers.training_args" for kind in kinds for base in kind.__mro__):
        found = {title: [] for title in _ORDER}
        groups |= dict.fromkeys(ESSENTIAL, _ORDER[0])
    else:
        groups = dict.fromkeys(groups, "options")
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._StoreFalseAction):
            continue
        title = groups.get(action.dest, "options") if action.option_strings else "arguments"
        found.setdefault(title, []).append(action)
    if _ORDER[0] in found:
        found[_ORDER[0]].sort(key=lambda action: ESSENTIAL.index(action.dest))
    return found


def _group(kind: type, field: str) -> str:
    """The group of a field, by the class that first declares it."""
    if str(kind.__dataclass_fields__[field].metadata.get("help")).startswith("Deprecated"):  # pyright: ignore
        return OLDER
    owner = next(base for base in reversed(kind.__mro__) if field in vars(base).get("__annotations__", {}))
    module = kind.__dataclass_fields__[field].metadata.get("module", owner.__module__)  # pyright: ignore
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
        found = kinds.get(action.type) or kinds.get(getattr(action.type, "__name__", ""))  # pyright: ignore
        return found or ("PATH" if re.search(r"(dir|path|file|folder)$", action.dest) else "TEXT")

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
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
