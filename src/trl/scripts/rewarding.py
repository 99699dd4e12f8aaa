"""Trainers that learn from rewards, as command lines describe them."""

from collections.abc import Callable
from typing import Any, TypeVar

from trl.options.model import ModelConfig
from trl.scripts.arguments import RewardFunctions
from trl.scripts.training import load_inputs, make_trainer

Trainer = TypeVar("Trainer", bound=Any)


def make_rewarded_trainer(
    trainer_class: Callable[..., Trainer],
    script_args: RewardFunctions,
    training_args: Any,
    model_args: ModelConfig,
    dataset_args: Any,
) -> Trainer:
    """The trainer that these options describe; what judges is found before data and model are loaded.

    Raises:
        ValueError, TypeError, FileNotFoundError, ImportError: about what the user handed in.
    """
    from trl.rewards import resolve_reward_funcs

    model = script_args.reward_model_name_or_path
    names = script_args.reward_funcs or []
    if not (model or names):
        raise ValueError(
            "reward_funcs is missing: nothing judges the completions. Give one or several with --reward_funcs: a function of "
            "trl.rewards such as think_format_reward, a dotted path such as my_module.my_function, or a reward model's folder "
            "or name on the Hub."
        )
    rewards = [*([model] if model else []), *resolve_reward_funcs(names)]
    datasets = load_inputs(script_args, training_args, model_args, dataset_args)
    return make_trainer(trainer_class, script_args, training_args, model_args, datasets, reward_funcs=rewards)
