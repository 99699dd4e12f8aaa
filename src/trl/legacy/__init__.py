"""The keyword arguments of 0.4-0.11, moved onto the config.

Programs of that time gave a trainer what belongs to its config today, and gave `TrainingArguments` as `args`. Each
trainer has a table here that says where its older arguments went; one `FutureWarning` names the new places.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from transformers import TrainingArguments

from trl.options.training import TrainingDefaults, require_set_up, wrong_config


class LegacyArgument(NamedTuple):
    """Where an older argument went: a config field, another argument of the trainer, or nowhere (`ignored`)."""

    kind: Literal["config", "argument", "ignored"]
    to: str = ""


def _fields(*names: str) -> dict[str, LegacyArgument]:
    """Arguments that are fields of the config under the same names."""
    return {name: LegacyArgument("config", name) for name in names}


SFT_ARGUMENTS: Mapping[str, LegacyArgument] = {
    "tokenizer": LegacyArgument("argument", "processing_class"),
    "model_init": LegacyArgument("argument", "model"),
    **_fields("dataset_text_field", "packing"),
    "max_seq_length": LegacyArgument("config", "max_length"),
    **_fields(
        "dataset_num_proc", "dataset_kwargs", "eval_packing", "neftune_noise_alpha", "model_init_kwargs"
    ),
    "infinite": LegacyArgument("ignored", "max_steps sets how long a run is; an epoch may be repeated"),
    "num_of_sequences": LegacyArgument("ignored", "packing needs no buffer size"),
    "chars_per_token": LegacyArgument("ignored", "packing counts tokens"),
    "dataset_batch_size": LegacyArgument("ignored", "rows are prepared in batches of a fixed size"),
}

ITERATIVE_SFT_ARGUMENTS: Mapping[str, LegacyArgument] = {
    "tokenizer": LegacyArgument("argument", "processing_class"),
    **_fields("max_length", "truncation_mode", "optimize_device_cache", "model_init_kwargs"),
}

_PREFERENCE_ARGUMENTS: Mapping[str, LegacyArgument] = {
    "tokenizer": LegacyArgument("argument", "processing_class"),
    "model_init": LegacyArgument("argument", "model"),
    **_fields(
        "beta",
        "loss_type",
        "label_pad_token_id",
        "padding_value",
        "truncation_mode",
        "max_length",
        "max_prompt_length",
    ),
    "max_target_length": LegacyArgument("config", "max_completion_length"),
    **_fields(
        "max_completion_length",
        "disable_dropout",
        "generate_during_eval",
        "dataset_num_proc",
        "model_init_kwargs",
    ),
}

_REFERENCE_ARGUMENTS: Mapping[str, LegacyArgument] = _fields(
    "precompute_ref_log_probs", "ref_model_init_kwargs", "model_adapter_name", "ref_adapter_name"
)

_FOUND_BY_ITSELF = LegacyArgument("ignored", "the model's config says what it is")

DPO_ARGUMENTS: Mapping[str, LegacyArgument] = {
    **_PREFERENCE_ARGUMENTS,
    **_REFERENCE_ARGUMENTS,
    **_fields("label_smoothing", "reference_free", "force_use_ref_model"),
    "is_encoder_decoder": _FOUND_BY_ITSELF,
}

ORPO_ARGUMENTS: Mapping[str, LegacyArgument] = {
    **{
        name: older
        for name, older in _PREFERENCE_ARGUMENTS.items()
        if name not in ("model_init", "loss_type")
    },
    "is_encoder_decoder": LegacyArgument("config", "is_encoder_decoder"),
}

CPO_ARGUMENTS: Mapping[str, LegacyArgument] = {
    **ORPO_ARGUMENTS,
    **_fields("loss_type", "label_smoothing", "cpo_alpha", "simpo_gamma"),
}

BCO_ARGUMENTS: Mapping[str, LegacyArgument] = {
    **{name: older for name, older in _PREFERENCE_ARGUMENTS.items() if name != "loss_type"},
    **_fields(
        "precompute_ref_log_probs",
        "ref_model_init_kwargs",
        "is_encoder_decoder",
        "prompt_sample_size",
        "min_density_ratio",
        "max_density_ratio",
    ),
}

KTO_ARGUMENTS: Mapping[str, LegacyArgument] = {
    **{
        name: older
        for name, older in BCO_ARGUMENTS.items()
        if "density" not in name and name != "prompt_sample_size"
    },
    **_fields("loss_type", "desirable_weight", "undesirable_weight"),
}

REWARD_ARGUMENTS: Mapping[str, LegacyArgument] = {
    "tokenizer": LegacyArgument("argument", "processing_class"),
    "model_init": LegacyArgument("argument", "model"),
    **_fields("max_length", "dataset_num_proc", "model_init_kwargs"),
}

PRM_ARGUMENTS: Mapping[str, LegacyArgument] = {
    **REWARD_ARGUMENTS,
    **_fields("max_prompt_length", "max_completion_length", "step_separator", "train_on_last_step_only"),
}

PPO_V2_ARGUMENTS: Mapping[str, LegacyArgument] = {
    "config": LegacyArgument("argument", "args"),
    "tokenizer": LegacyArgument("argument", "processing_class"),
    "policy": LegacyArgument("argument", "model"),
    "ref_policy": LegacyArgument("argument", "ref_model"),
}

RLOO_ARGUMENTS: Mapping[str, LegacyArgument] = {
    "config": LegacyArgument("argument", "args"),
    "policy": LegacyArgument("argument", "model"),
    "reward_model": LegacyArgument("argument", "reward_funcs"),
    "tokenizer": LegacyArgument("argument", "processing_class"),
    "ref_policy": LegacyArgument("ignored", "the reference is the policy as it is at the start"),
    "data_collator": LegacyArgument("ignored", "prompts are tokenised by the trainer"),
}


class Moved(NamedTuple):
    """A trainer's arguments after the move."""

    model: Any
    args: Any
    processing_class: Any


def move_onto_config(
    table: Mapping[str, LegacyArgument], config_class: type, *, model: Any, args: Any, processing_class: Any,
    older: Mapping[str, Any],
) -> Moved:  # fmt: skip
    """Apply a trainer's table of older arguments, and make `args` an instance of `config_class`.

    Raises: TypeError for an argument that no level of the interface knows, ValueError for one given in both places.
    """
    _check_known(table, older, config_class)
    for name, value in (("tokenizer", processing_class), ("model_init", model)):
        if older.get(name) is not None and value is not None:
            raise ValueError(
                f"{name} and {table[name].to} were both given, expected one. Leave out {name}, the older of the two."
            )
    fields = {table[name].to: value for name, value in older.items() if table[name].kind == "config"}
    args = _as_config(args, config_class, fields, model)
    if older:
        warnings.warn(_advice(table, older, config_class), FutureWarning, stacklevel=3)
    if model is None and "model_init" in older:
        model = older["model_init"]()
    if processing_class is None:
        processing_class = older.get("tokenizer")
    return Moved(model, args, processing_class)


def move_arguments(
    table: Mapping[str, LegacyArgument],
    config_class: type,
    given: Mapping[str, Any],
    older: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments that were `given` under today's names, with those that were given under `older` ones.

    Raises: TypeError for an argument that no level of the interface knows, ValueError for one given under both names.
    """
    _check_known(table, older, config_class)
    found = dict(given)
    for name, value in older.items():
        if table[name].kind == "ignored":
            continue
        if found[table[name].to] is not None:
            raise ValueError(
                f"{name} and {table[name].to} were both given, expected one. Leave out {name}, the older of the two."
            )
        found[table[name].to] = value
    if older:
        warnings.warn(_advice(table, older, config_class), FutureWarning, stacklevel=3)
    return found


def _check_known(table: Mapping[str, LegacyArgument], older: Mapping[str, Any], config_class: type) -> None:
    for name in older:
        if name in table:
            continue
        fields = [field.name for field in dataclasses.fields(config_class)]  # type: ignore[arg-type]
        near = get_close_matches(name, [*table, *fields], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        place = (
            f"It is a field of {config_class.__name__}: set it there."
            if name in fields
            else (
                f"Settings are fields of {config_class.__name__}; of older programs' arguments {sorted(table)} are understood."
            )
        )
        raise TypeError(f"unexpected keyword argument {name!r}. {place}{'' if name in fields else hint}")


def _as_config(args: Any, config_class: type, changes: Mapping[str, Any], model: Any) -> Any:
    if args is None:
        return config_class(output_dir=default_output_dir(model, config_class), **changes)
    if isinstance(args, config_class):
        require_set_up(args)
        return dataclasses.replace(args, **changes) if changes else args
    of_another_method = isinstance(args, TrainingDefaults) and not issubclass(config_class, type(args))
    if of_another_method or not isinstance(
        args, TrainingArguments
    ):  # plain ones are what older programs gave
        raise wrong_config(args, config_class)
    own = {field.name for field in dataclasses.fields(config_class) if field.init}  # type: ignore[arg-type]
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
    return config_class(**{**{name: value for name, value in given.items() if name in own}, **changes})


def default_output_dir(model: Any, config_class: type) -> str:
    """`<model's name>-<method>`, the output directory of a trainer without `args`."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    return f"{(name or 'model').rstrip('/').split('/')[-1]}-{config_class.__name__.removesuffix('Config')}"


def _advice(table: Mapping[str, LegacyArgument], older: Mapping[str, Any], config_class: type) -> str:
    name = config_class.__name__
    words = {"config": f"{name}({{to}}=...)", "argument": "the argument {to}", "ignored": "nothing ({to})"}
    places = "; ".join(f"{key} -> {words[table[key].kind].format(to=table[key].to)}" for key in older)
    return f"these arguments have moved and will not be understood for ever: {places}."
