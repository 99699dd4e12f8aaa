"""What the training commands share: how their inputs are loaded, how they run, what their parsers take."""

import argparse
import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from trl.options.model import ModelConfig
from trl.scripts.arguments import ColumnMapping, ScriptArguments
from trl.scripts.parser import TrlParser
from trl.scripts.running import CommandError, Terminated, reporting_input_errors

logger = logging.getLogger(__name__)

Trainer = TypeVar("Trainer", bound=Any)

LAUNCHING = (
    "Any option of `accelerate launch` (--num_processes, --mixed_precision, ...) is taken too, as is --accelerate_config with "
    "a profile (single_gpu, multi_gpu, fsdp1, fsdp2, zero1, zero2, zero3, cpu) or a file."
)


def train(
    build: Callable[..., Trainer],
    script_args: ScriptArguments,
    training_args: Any,
    *others: Any,
    command: str,
) -> Trainer:
    """Build a trainer from the arguments, train it, save its model, say where it is; returns the trainer.

    With `dry_run` the trainer is built and described, and nothing is trained or written.

    Raises:
        CommandError: for everything about the input that is wrong, before the first step.
    """
    from trl.reporting.trackers import check_trackers
    from trl.scripts.allocator import keep_freed_memory
    from trl.scripts.dry_run import changed_settings, describe
    from trl.scripts.outputs import check_output_dir, check_push
    from trl.scripts.resume import checkpoint_to_resume
    from trl.scripts.summary import finish

    if training_args.device.type == "cpu":
        keep_freed_memory()
    with reporting_input_errors():
        output_dir = training_args.output_dir or "."
        check_output_dir(output_dir)
        check_push(training_args)
        check_trackers(training_args.report_to)
        checkpoint = checkpoint_to_resume(
            training_args.resume_from_checkpoint, output_dir, without=training_args.resume_without or ()
        )
        settings, made_folder = (
            changed_settings(script_args, training_args, *others),
            not Path(output_dir).exists(),
        )
        trainer = build(script_args, training_args, *others)
    if script_args.dry_run:
        describe(trainer, settings, made_folder=made_folder)
        return trainer
    with telling_the_way_on(trainer, command=command):
        trainer.train(resume_from_checkpoint=checkpoint)
        if any(getattr(each, "is_made", False) for each in trainer.callback_handler.callbacks):
            trainer.accelerator.end_training()
            raise Terminated  # after the checkpoint that enable_jit_checkpoint asks for
    finish(trainer, dataset_name=script_args.dataset_name, command=command, newest=trainer.newest_checkpoint)
    return trainer


@contextmanager
def telling_the_way_on(trainer: Any, *, command: str) -> Iterator[None]:
    """Say, where training is interrupted or fails, how far it came and how it goes on: in the log, or below the traceback.

    Raises: CommandError for a package of an optimiser or of kernels, which are looked for when training begins, and for a
    checkpoint or an output folder that cannot be used.
    """
    from trl.checkpoints.wholeness import CheckpointError
    from trl.scripts.going_on import interruption

    def told() -> str:
        step, steps = trainer.state.global_step, trainer.state.max_steps
        return interruption(trainer.newest_checkpoint, trainer.args, command=command, step=step, steps=steps)

    try:
        yield
    except (KeyboardInterrupt, Terminated):
        if trainer.accelerator.is_main_process:
            logger.warning(told())
        raise
    except Exception as error:
        if trainer.state.global_step:
            error.add_note(told())
        elif isinstance(error, (ImportError, CheckpointError)):
            raise CommandError(str(error)) from error
        raise


def load_inputs(
    script_args: ScriptArguments, training_args: Any, model_args: ModelConfig, dataset_args: Any
) -> tuple[Any, Any]:
    """The training and the evaluation set; `training_args` then hold how the model is loaded.

    Raises:
        ValueError, TypeError, FileNotFoundError, ImportError: about what the user handed in.
    """
    from trl.scripts.loading import load_train_and_eval
    from trl.scripts.model_loading import model_init_kwargs
    from trl.scripts.processes import check_processes

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
    return load_train_and_eval(
        script_args,
        dataset_args,
        renames=script_args.renames() if isinstance(script_args, ColumnMapping) else {},
        evaluate=training_args.eval_strategy != "no",
    )


def make_trainer(
    trainer_class: Callable[..., Trainer],
    script_args: ScriptArguments,
    training_args: Any,
    model_args: ModelConfig,
    datasets: tuple[Any, Any],
    **others: Any,
) -> Trainer:
    """The trainer that these options describe, on the `datasets` that `load_inputs` answered with.

    `others` are more arguments of its class; a `peft_config` among them stands instead of that of `model_args`.
    """
    from trl.models.peft import get_peft_config

    if "peft_config" not in others:
        others["peft_config"] = get_peft_config(model_args)
    train_dataset, eval_dataset = datasets
    trainer = trainer_class(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **others,
    )
    if script_args.ignore_bias_buffers:
        ignore_boolean_buffers(trainer.model)
    return trainer


def ignore_boolean_buffers(model: Any) -> None:
    """Leave the model's boolean buffers out of what `DistributedDataParallel` broadcasts."""
    import torch

    names = [name for name, buffer in model.named_buffers() if buffer.dtype == torch.bool]
    model._ddp_params_and_buffers_to_ignore = names


def training_parser(
    command: str,
    kinds: Sequence[type],
    subparsers: "argparse._SubParsersAction | None",
    *,
    help_text: str,
    description: str,
    needs: str = "",
) -> TrlParser:
    """The parser of a training command; added to `subparsers` if given (which must build `TrlParser`s).

    `needs`: what its usage names beside model and data.
    """
    from trl.data.mixtures import DatasetMixtureConfig

    types: Any = (*kinds, ModelConfig, DatasetMixtureConfig)
    if subparsers is not None:
        return subparsers.add_parser(command, help=help_text, dataclass_types=types)
    return TrlParser(
        types,
        prog=f"trl {command}",
        usage=textwrap.fill(
            f"trl {command} --model_name_or_path MODEL --dataset_name DATASET {needs} [options]".replace(
                "  ", " "
            ),
            width=72,
            subsequent_indent=" " * len(f"usage: trl {command} "),
        ),
        description=description,
        epilog=LAUNCHING,
    )
