"""Reward modelling from the command line: `trl reward`.

    trl reward --model_name_or_path Qwen/Qwen3-0.6B --dataset_name pairs.jsonl --output_dir my-reward-model

or, without the `trl` command, `accelerate launch -m trl.scripts.reward` with the same options.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from trl.options.model import ModelConfig
from trl.scripts.arguments import RewardScriptArguments
from trl.scripts.parser import TrlParser
from trl.scripts.running import run_script
from trl.scripts.training import load_inputs, make_trainer, train, training_parser
from trl.trainer.reward_config import RewardConfig

if TYPE_CHECKING:
    from trl.data.mixtures import DatasetMixtureConfig
    from trl.trainer.reward_trainer import RewardTrainer


def main(
    script_args: RewardScriptArguments,
    training_args: RewardConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "RewardTrainer":
    """Train a reward model on pairs, save it, say where it is; returns the trainer.

    Raises:
        CommandError: for everything about the input that is wrong, before the first step.
    """
    return train(build_trainer, script_args, training_args, model_args, dataset_args, command="reward")


def build_trainer(
    script_args: RewardScriptArguments,
    training_args: RewardConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "RewardTrainer":
    """The trainer that these options describe, its datasets loaded and checked.

    `lora_task_type` is for language models unless the user says otherwise: an adapter here is one of a classifier.

    Raises:
        ValueError, TypeError, FileNotFoundError, ImportError: about what the user handed in.
    """
    from trl.models.peft import get_peft_config
    from trl.trainer.reward_trainer import RewardTrainer

    datasets = load_inputs(script_args, training_args, model_args, dataset_args)
    peft_config = get_peft_config(model_args)
    if peft_config is not None and peft_config.task_type == ModelConfig.lora_task_type:
        peft_config.task_type = "SEQ_CLS"
    return make_trainer(
        RewardTrainer, script_args, training_args, model_args, datasets, peft_config=peft_config
    )


def make_parser(subparsers: "argparse._SubParsersAction | None" = None) -> TrlParser:
    """The parser of the command; added to `subparsers` if given (which must build `TrlParser`s)."""
    return training_parser(
        "reward",
        (RewardScriptArguments, RewardConfig),
        subparsers,
        help_text="reward modelling",
        description="Reward modelling on pairs of which one is preferred.",
    )


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
