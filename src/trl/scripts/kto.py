"""Learning from desirable and undesirable completions, from the command line: `trl kto`.

    trl kto --model_name_or_path Qwen/Qwen3-0.6B --dataset_name ratings.jsonl --output_dir my-model

or, without the `trl` command, `accelerate launch -m trl.scripts.kto` with the same options.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from trl.options.model import ModelConfig
from trl.scripts.arguments import KTOScriptArguments
from trl.scripts.parser import TrlParser
from trl.scripts.running import run_script
from trl.scripts.training import load_inputs, make_trainer, train, training_parser
from trl.trainer.kto_config import KTOConfig

if TYPE_CHECKING:
    from trl.data.mixtures import DatasetMixtureConfig
    from trl.trainer.kto_trainer import KTOTrainer


def main(
    script_args: KTOScriptArguments,
    training_args: KTOConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "KTOTrainer":
    """Train a model with KTO, save it, say where it is; returns the trainer.

    Raises:
        CommandError: for everything about the input that is wrong, before the first step.
    """
    return train(build_trainer, script_args, training_args, model_args, dataset_args, command="kto")


def build_trainer(
    script_args: KTOScriptArguments,
    training_args: KTOConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "KTOTrainer":
    """The trainer that these options describe, its datasets loaded and checked.

    Raises:
        ValueError, TypeError, FileNotFoundError, ImportError: about what the user handed in.
    """
    from trl.trainer.kto_trainer import KTOTrainer

    datasets = load_inputs(script_args, training_args, model_args, dataset_args)
    return make_trainer(KTOTrainer, script_args, training_args, model_args, datasets)


def make_parser(subparsers: "argparse._SubParsersAction | None" = None) -> TrlParser:
    """The parser of the command; added to `subparsers` if given (which must build `TrlParser`s)."""
    return training_parser(
        "kto",
        (KTOScriptArguments, KTOConfig),
        subparsers,
        help_text="learning from completions marked desirable or not",
        description="Kahneman-Tversky optimisation of a language model on completions marked desirable or not.",
    )


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
