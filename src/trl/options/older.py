"""Training arguments of transformers 4, moved to where transformers 5 has them."""

from dataclasses import dataclass, field
from typing import Any

from trl.options.checks import warn_caller
from trl.options.groups import OptionGroup

# Older name -> the field that took its place; None: nothing is left to set.
_MOVED: dict[str, str | None] = {
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "group_by_length": "train_sampling_strategy",
    "overwrite_output_dir": None,
    "save_safetensors": None,
    "logging_dir": None,
}
_ADVICE = {
    "overwrite_output_dir": "an output directory is always written into",
    "save_safetensors": "weights are always saved as safetensors",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
}


def _older(help_text: str) -> Any:
    return field(default=None, metadata={"help": f"Deprecated: {help_text}"})


@dataclass
class OlderTrainingArguments(OptionGroup):
    """Names that documents of the 0.x levels use and transformers 5 no longer has."""

    warmup_ratio: float | None = _older(
        "the share of all steps that warm up; warmup_steps takes it, below 1."
    )
    evaluation_strategy: str | None = _older("now eval_strategy.")
    no_cuda: bool | None = _older("now use_cpu.")
    group_by_length: bool | None = _older("now train_sampling_strategy='group_by_length'.")
    overwrite_output_dir: bool | None = _older("an output directory is always written into.")
    save_safetensors: bool | None = _older("weights are always saved as safetensors.")
    logging_dir: str | None = _older("set the environment variable TENSORBOARD_LOGGING_DIR.")

    def check(self) -> None:
        given = {name: value for name in _MOVED if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            self._move(name, value)
            setattr(self, name, None)
        if given:
            places = [f"{name} -> {_MOVED[name] or 'nothing, ' + _ADVICE[name]}" for name in given]
            message = f"transformers 5 no longer has these training arguments: {'; '.join(places)}."
            warn_caller(message, FutureWarning)
        super().check()

    def _move(self, name: str, value: Any) -> None:
        if name == "warmup_ratio" and not 0 <= value < 1:
            raise ValueError(
                f"warmup_ratio must be in [0, 1), got {value}. Use warmup_steps for a number of steps."
            )
        if name == "group_by_length":
            value = "group_by_length" if value else "random"
        target = _MOVED[name]
        if target is not None:
            setattr(self, target, value)


# Older name of RLOO's settings -> the field that took its place.
_OF_RLOO = {
    "rloo_k": "num_generations",
    "cliprange": "epsilon",
    "kl_coef": "beta",
    "exp_name": "run_name",
    "normalize_reward": "normalize_advantages",
    "num_ppo_epochs": "num_iterations",
    "num_mini_batches": "steps_per_generation",
    "response_length": "max_completion_length",
}


@dataclass
class OlderRLOO(OptionGroup):
    """Names that programs of 0.21 and before give RLOO's settings."""

    rloo_k: int | None = _older("now num_generations.")
    cliprange: float | None = _older("now epsilon.")
    kl_coef: float | None = _older("now beta.")
    exp_name: str | None = _older("now run_name.")
    normalize_reward: bool | None = _older("now normalize_advantages; it never normalised rewards.")
    num_ppo_epochs: int | None = _older("now num_iterations.")
    num_mini_batches: int | None = _older("now steps_per_generation.")
    response_length: int | None = _older("now max_completion_length.")

    def check(self) -> None:
        given = {name: value for name in _OF_RLOO if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            setattr(self, _OF_RLOO[name], value)
            setattr(self, name, None)
        if given:
            places = "; ".join(f"{name} -> {_OF_RLOO[name]}" for name in given)
            warn_caller(f"these settings of RLOO have other names since 0.22: {places}.", FutureWarning)
        super().check()
