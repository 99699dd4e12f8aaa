"""Group relative policy optimisation from the command line: `trl grpo`.

    trl grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name prompts.jsonl --reward_funcs my_rewards.is_right \
        --output_dir my-model

or, without the `trl` command, `accelerate launch -m trl.scripts.grpo` with the same options.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from trl._lazy import attach
from trl.options.model import ModelConfig
from trl.scripts.arguments import GRPOScriptArguments
from trl.scripts.parser import TrlParser
from trl.scripts.rewarding import make_rewarded_trainer
from trl.scripts.running import run_script
from trl.scripts.training import train, training_parser
from trl.trainer.grpo_config import GRPOConfig

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

if TYPE_CHECKING:
    from trl.data.mixtures import DatasetMixtureConfig
    from trl.trainer.grpo_trainer import GRPOTrainer


def main(
    script_args: GRPOScriptArguments,
    training_args: GRPOConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "GRPOTrainer":
    """Train a model with GRPO, save it, say where it is; returns the trainer.

    Raises:
        CommandError: for everything about the input that is wrong, before the first step.
    """
    return train(build_trainer, script_args, training_args, model_args, dataset_args, command="grpo")


def build_trainer(
    script_args: GRPOScriptArguments,
    training_args: GRPOConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "GRPOTrainer":
    """The trainer that these options describe, its prompts and what judges the completions loaded and checked.

    Raises:
        ValueError, TypeError, FileNotFoundError, ImportError: about what the user handed in.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    return make_rewarded_trainer(GRPOTrainer, script_args, training_args, model_args, dataset_args)


def make_parser(subparsers: "argparse._SubParsersAction | None" = None) -> TrlParser:
    """The parser of the command; added to `subparsers` if given (which must build `TrlParser`s)."""
    return training_parser(
        "grpo",
        (GRPOScriptArguments, GRPOConfig),
        subparsers,
        help_text="group relative policy optimisation",
        description="Group relative policy optimisation: a language model learns from the rewards of its own completions, each "
        "judged against the others of its prompt.",
        needs="--reward_funcs REWARD ...",
    )


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
