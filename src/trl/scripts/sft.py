"""Supervised fine-tuning from the command line: `trl sft`.

    trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name train.jsonl --column_mapping question=prompt \
        answer=completion --output_dir my-model

or, without the `trl` command, `accelerate launch -m trl.scripts.sft` with the same options.
"""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from trl.options.model import ModelConfig
from trl.scripts.arguments import SFTScriptArguments
from trl.scripts.parser import TrlParser
from trl.scripts.running import reporting_input_errors, run_script
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
    from trl.scripts.resume import checkpoint_to_resume
    from trl.scripts.summary import finish

    with reporting_input_errors():
        trainer = build_trainer(script_args, training_args, model_args, dataset_args)
        checkpoint = checkpoint_to_resume(
            training_args.resume_from_checkpoint, training_args.output_dir or "."
        )
    trainer.train(resume_from_checkpoint=checkpoint)
    finish(trainer, dataset_name=script_args.dataset_name, command="sft")
    return trainer


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
    from trl.models.peft import get_peft_config
    from trl.scripts.loading import load_train_and_eval
    from trl.scripts.model_loading import model_init_kwargs
    from trl.scripts.processes import check_processes
    from trl.trainer.sft_trainer import SFTTrainer

    check_processes(training_args)
    if model_args.model_name_or_path is None:
        raise ValueError(
            "model_name_or_path is missing. Give the directory of a model or its name on the Hub with "
            "--model_name_or_path."
        )
    if script_args.gradient_checkpointing_use_reentrant and training_args.gradient_checkpointing:
        settings: Any = training_args.gradient_checkpointing_kwargs or {}
        training_args.gradient_checkpointing_kwargs = {**settings, "use_reentrant": True}
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
    train_dataset, eval_dataset = load_train_and_eval(
        script_args,
        dataset_args,
        renames=script_args.renames(),
        evaluate=training_args.eval_strategy != "no",
    )
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model_args),
    )
    if script_args.ignore_bias_buffers:
        ignore_boolean_buffers(trainer.model)
    return trainer


def ignore_boolean_buffers(model: Any) -> None:
    """Leave the model's boolean buffers out of what `DistributedDataParallel` broadcasts."""
    import torch

    names = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.bool]
    model._ddp_params_and_buffers_to_ignore = names


def make_parser(subparsers: "argparse._SubParsersAction | None" = None) -> TrlParser:
    """The parser of the command; added to `subparsers` if given (which must build `TrlParser`s)."""
    from trl.data.mixtures import DatasetMixtureConfig

    kinds: Any = (SFTScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
    if subparsers is not None:
        return subparsers.add_parser("sft", help="supervised fine-tuning", dataclass_types=kinds)
    return TrlParser(
        kinds,
        prog="trl sft",
        usage="trl sft --model_name_or_path MODEL --dataset_name DATASET [--config FILE] [options]",
        description="Supervised fine-tuning of a language model.",
        epilog="Any option of `accelerate launch` (--num_processes, --mixed_precision, ...) is taken too, as is "
        "--accelerate_config with a profile (single_gpu, multi_gpu, fsdp1, fsdp2, zero1, zero2, zero3, cpu) or a file.",
    )


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), main))
