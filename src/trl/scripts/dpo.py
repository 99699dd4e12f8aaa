"""Direct preference optimisation from the command line: `trl dpo`.

    trl dpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name pairs.jsonl --output_dir my-model

or, without the `trl` command, `accelerate launch -m trl.scripts.dpo` with the same options.
"""

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from trl.options.model import ModelConfig
from trl.scripts.arguments import DPOScriptArguments
from trl.scripts.parser import TrlParser
from trl.scripts.running import run_script
from trl.scripts.training import load_inputs, make_trainer, train, training_parser
from trl.trainer.dpo_config import DPOConfig

if TYPE_CHECKING:
    from trl.data.mixtures import DatasetMixtureConfig
    from trl.trainer.dpo_trainer import DPOTrainer


def main(
    script_args: DPOScriptArguments,
    training_args: DPOConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "DPOTrainer":
    """Train a model on pairs, save it, say where it is; returns the trainer.

    Raises:
        CommandError: for everything about the input that is wrong, before the first step.
    """
    return train(build_trainer, script_args, training_args, model_args, dataset_args, command="dpo")


def build_trainer(
    script_args: DPOScriptArguments,
    training_args: DPOConfig,
    model_args: ModelConfig,
    dataset_args: "DatasetMixtureConfig",
) -> "DPOTrainer":
    """The trainer that these options describe, its datasets loaded and checked.

    A reference of its own is loaded as the model is, unless `ref_model_init_kwargs` says otherwise.

    Raises:
        ValueError, TypeError, FileNotFoundError, ImportError: about what the user handed in.
    """
    from trl.trainer.dpo_trainer import DPOTrainer

    train_dataset, eval_dataset = load_inputs(script_args, training_args, model_args, dataset_args)
    if script_args.ref_model_name_or_path is not None and training_args.ref_model_init_kwargs is None:
        training_args.ref_model_init_kwargs = training_args.model_init_kwargs
    marker = script_args.dialogue_marker
    datasets = (split_dialogues(train_dataset, marker), split_dialogues(eval_dataset, marker))
    return make_trainer(
        DPOTrainer,
        script_args,
        training_args,
        model_args,
        datasets,
        ref_model=script_args.ref_model_name_or_path,
    )


def split_dialogues(dataset: Any, marker: str | None) -> Any:
    """The rows as prompt and answers, cut at `marker`; as they are where there is none, or no dataset."""
    if marker is None or dataset is None:
        return dataset
    from trl.data.formats import split_dialogue

    return dataset.map(partial(split_dialogue, marker=marker))


def make_parser(subparsers: "argparse._SubParsersAction | None" = None) -> TrlParser:
    """The parser of the command; added to `subparsers` if given (which must build `TrlParser`s)."""
    return training_parser(
        "dpo",
        (DPOScriptArguments, DPOConfig),
        subparsers,
        help_text="direct preference optimisation",
        description="Direct preference optimisation of a language model on pairs of which one is preferred.",
    )


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
