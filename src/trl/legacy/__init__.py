"""The keyword arguments of 0.4-0.11, moved onto the config.

Programs of that time gave a trainer what belongs to its config today, and `TrainingArguments` as `args`. One
`FutureWarning` names the new places.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer, TrainingArguments

from trl.data.rendering import Fields
from trl.options.spelling import did_you_mean
from trl.options.training import TrainingDefaults, require_set_up, wrong_config

_PAIRS = (
    "tokenizer", "beta", "label_pad_token_id", "padding_value", "truncation_mode", "max_length", "max_prompt_length",
    "max_target_length", "max_completion_length", "disable_dropout", "generate_during_eval", "dataset_num_proc",
    "model_init_kwargs", "is_encoder_decoder",
)  # fmt: skip
_REFERENCE = ("model_init", "precompute_ref_log_probs", "ref_model_init_kwargs")
_REWARD = ("tokenizer", "model_init", "max_length", "dataset_num_proc", "model_init_kwargs")
_TEXT = (
    "tokenizer", "model_init", "dataset_text_field", "packing", "max_seq_length", "dataset_num_proc", "dataset_kwargs",
    "eval_packing", "neftune_noise_alpha", "model_init_kwargs",
)  # fmt: skip
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "SFTConfig": (*_TEXT, "infinite", "num_of_sequences", "chars_per_token", "dataset_batch_size"),
    "GKDConfig": _TEXT,
    "IterativeSFTConfig": (
        "tokenizer", "max_length", "truncation_mode", "optimize_device_cache", "model_init_kwargs"
    ),
    "DPOConfig": (
        *_PAIRS, *_REFERENCE, "loss_type", "model_adapter_name", "ref_adapter_name", "label_smoothing",
        "reference_free", "force_use_ref_model",
    ),
    "ORPOConfig": _PAIRS,
    "CPOConfig": (*_PAIRS, "loss_type", "label_smoothing", "cpo_alpha", "simpo_gamma"),
    "BCOConfig": (*_PAIRS, *_REFERENCE, "prompt_sample_size", "min_density_ratio", "max_density_ratio"),
    "KTOConfig": (*_PAIRS, *_REFERENCE, "loss_type", "desirable_weight", "undesirable_weight"),
    "RewardConfig": _REWARD,
    "PRMConfig": (
        *_REWARD, "max_prompt_length", "max_completion_length", "step_separator", "train_on_last_step_only"
    ),
    "PPOConfig": ("config", "tokenizer", "policy", "ref_policy"),
    "RLOOConfig": ("config", "policy", "reward_model", "tokenizer", "ref_policy", "data_collator"),
}  # fmt: skip
"""The older arguments of each trainer, by its config: fields of that name, unless the tables below say otherwise."""

_FIELDS = {"max_seq_length": "max_length", "max_target_length": "max_completion_length"}
_ARGUMENTS = {
    "tokenizer": "processing_class", "model_init": "model", "config": "args", "policy": "model",
    "ref_policy": "ref_model", "reward_model": "reward_funcs",
}  # fmt: skip
_IGNORED: Mapping[str, Mapping[str, str]] = {
    "SFTConfig": {
        "infinite": "max_steps sets how long a run is; an epoch may be repeated",
        "num_of_sequences": "packing needs no buffer size",
        "chars_per_token": "packing counts tokens",
        "dataset_batch_size": "rows are prepared in batches of a fixed size",
    },
    "DPOConfig": {"is_encoder_decoder": "the model's config says what it is"},
    "RLOOConfig": {"data_collator": "prompts are tokenised by the trainer"},
}


class Moved(NamedTuple):
    """A trainer's arguments after the move."""

    model: str | nn.Module | None
    args: TrainingArguments
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None


def move_onto_config(
    config_class: type[TrainingArguments], *, model: str | nn.Module | None, args: TrainingArguments | None,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None, older: Fields,
) -> Moved:  # fmt: skip
    """Move a trainer's older arguments, and make `args` an instance of `config_class`.

    Raises: TypeError for an argument that no level of the interface knows, ValueError for one given in both places.
    """
    arguments = {"model": model, "processing_class": processing_class}
    moved = move_arguments(config_class, arguments, older, stacklevel=5)
    args = _as_config(args, config_class, {name: moved[name] for name in moved if name not in arguments}, model)
    if model is None and "model_init" in older:
        moved["model"] = older["model_init"]()
    return Moved(moved["model"], args, moved["processing_class"])


def move_arguments(
    config_class: type[TrainingArguments], newer: Fields, older: Fields, *, stacklevel: int = 3
) -> dict[str, Any]:
    """The arguments under today's names: `newer` as they are, with those that were given under `older` ones.

    Raises: TypeError for an argument that no level of the interface knows, ValueError for one given under both names.
    """
    config = config_class.__name__
    _check_known(older, config_class)
    moved, places = dict(newer), []
    for name, value in older.items():
        ignored = _IGNORED.get(config, {}).get(name)
        argument, field = _ARGUMENTS.get(name), _FIELDS.get(name, name)
        if ignored is not None:
            places.append(f"{name} -> nothing ({ignored})")
        elif argument is None:
            places.append(f"{name} -> {config}({field}=...)")
            moved[field] = value
        else:
            places.append(f"{name} -> the argument {argument}")
            if value is not None and moved[argument] is not None:
                both = f"{name} and {argument} were both given, expected one"
                raise ValueError(f"{both}. Leave out {name}, the older of the two.")
            moved[argument] = moved[argument] if value is None else value
    if places:
        text = f"these arguments have moved and will not be accepted forever: {'; '.join(places)}."
        warnings.warn(text, FutureWarning, stacklevel=stacklevel)
    return moved


def _check_known(older: Fields, config_class: type[TrainingArguments]) -> None:
    moving = next((_KNOWN[kind.__name__] for kind in config_class.__mro__ if kind.__name__ in _KNOWN), ())
    fields = [field.name for field in dataclasses.fields(config_class)]
    for name in set(older) - set(moving):
        if name in fields:
            advice = f" It is a field of {config_class.__name__}: set it there."
        else:
            arguments = (*inspect.signature(Trainer.__init__).parameters, "peft_config", "ref_model")
            advice = did_you_mean(name, arguments) or did_you_mean(name, [*moving, *fields])
            advice = advice or f" Settings are fields of {config_class.__name__}."
        raise TypeError(f"unexpected keyword argument {name!r}.{advice}")


def _as_config(
    args: TrainingArguments | None, config_class: type[TrainingArguments], changes: Fields,
    model: str | nn.Module | None,
) -> TrainingArguments:  # fmt: skip
    if args is None:
        name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        folder = (name or "model").rstrip("/").split("/")[-1]  # of the model's name and the method's
        return config_class(output_dir=f"{folder}-{config_class.__name__.removesuffix('Config')}", **changes)
    if isinstance(args, config_class):
        require_set_up(args)
        return dataclasses.replace(args, **changes) if changes else args
    of_another_method = isinstance(args, TrainingDefaults) and not issubclass(config_class, type(args))
    if of_another_method or not isinstance(args, TrainingArguments):  # plain ones are what older programs gave
        raise wrong_config(args, config_class)
    names = {field.name for field in dataclasses.fields(config_class) if field.init}
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
    return config_class(**{**{name: values[name] for name in values if name in names}, **changes})
