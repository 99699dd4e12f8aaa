"""Supervised fine-tuning from the command line: `trl sft`.

    trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name train.jsonl --column_mapping question=prompt \
        answer=completion --output_dir my-model

or, without the `trl` command, `accelerate launch -m trl.scripts.sft` with the same options.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from trl.options.model import ModelConfig
from trl.scripts.arguments import SFTScriptArguments
from trl.scripts.parser import TrlParser
from trl.scripts.running import run_script
from trl.scripts.training import load_inputs, make_trainer, train, training_parser
from trl.trainer.sft_config import SFTConfig

if TYPE_CHECKING:
    from trl.data.mixtures import DatasetMixtureConfig
    from trl.trainer.sft_trainer import SFTTrainer


def main(
    script_args: SFTScriptArguments,
    training_args: SFTConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "SFTTrainer":
    """Fine-tune a model on a dataset, save it, say where it is; returns the trainer.

    Raises:
        CommandError: for everything about the input that is wrong, before the first step.
    """
    return train(build_trainer, script_args, training_args, model_args, dataset_args, command="sft")


def build_trainer(
    script_args: SFTScriptArguments,
    training_args: SFTConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "SFTTrainer":
    """The trainer that these options describe, its datasets loaded and checked.

    Raises:
        ValueError, TypeError, FileNotFoundError, ImportError: about what the user handed in.
    """
    from trl.trainer.sft_trainer import SFTTrainer

    datasets = load_inputs(script_args, training_args, model_args, dataset_args)
    return make_trainer(SFTTrainer, script_args, training_args, model_args, datasets)


def make_parser(subparsers: "argparse._SubParsersAction | None" = None) -> TrlParser:
    """The parser of the command; added to `subparsers` if given (which must build `TrlParser`s)."""
    return training_parser(
        "sft",
        (SFTScriptArguments, SFTConfig),
        subparsers,
        help_text="supervised fine-tuning",
        description="Supervised fine-tuning of a language model.",
    )


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
