"""The training commands: one table, and how a command loads its inputs and trains.

A new command is a row of `COMMANDS`, a file of its name beside this one, and a row in `trl.cli.main`, which says what
it does.
"""

import argparse
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trl.cli.main import COMMANDS as ALL_COMMANDS
from trl.data.rendering import Json
from trl.data.sources import DatasetMixtureConfig
from trl.options.groups import unread_fields
from trl.options.model import ModelConfig
from trl.options.shared import changed_settings
from trl.scripts import arguments
from trl.scripts.arguments import ColumnMapping, CommandArguments, RewardFunctions, ScriptArguments
from trl.scripts.parser import TrlParser
from trl.scripts.running import CommandError, Terminated, reporting_input_errors, run_script

if TYPE_CHECKING:
    from trl.scripts.arguments import AnyConfig
    from trl.trainer.base_trainer import BaseTrainer

logger = logging.getLogger(__name__)
Others = Json  # further arguments of a trainer

LAUNCHING = (
    "Any option of `accelerate launch` (--num_processes, --mixed_precision, ...) is taken too, as is "
    "--accelerate_config with a profile (single_gpu, multi_gpu, fsdp1, fsdp2, zero1, zero2, zero3, cpu) or a file."
)


def train(name: str, script_args: CommandArguments, training_args: "AnyConfig", *others: Any) -> "BaseTrainer":
    """Build, train and save the trainer of a command, or (`dry_run`) describe it. Raises: CommandError before that."""
    from trl.checkpoints.mirror import Mirror
    from trl.reporting.trackers import check_trackers
    from trl.scripts.env import keep_freed_memory
    from trl.scripts.loading import check_output_dir, check_push, checkpoint_to_resume
    from trl.scripts.messages import describe, finish

    if training_args.device.type == "cpu":
        keep_freed_memory()
    with reporting_input_errors():
        output_dir = training_args.output_dir or "."
        check_output_dir(output_dir)
        check_push(training_args)
        check_trackers(training_args.report_to)
        without = training_args.resume_without or ()
        resume, url = training_args.resume_from_checkpoint, training_args.checkpoint_mirror
        mirror = Mirror(url) if url and not script_args.dry_run else None
        checkpoint = checkpoint_to_resume(resume, output_dir, without=without, mirror=mirror)
        settings = changed_settings(script_args, training_args, *others)
        made_folder = not Path(output_dir).exists()
        trainer, has_chats = build_trainer(name, script_args, training_args, *others)
        trainer.run_report.settings = settings
    if script_args.dry_run:
        describe(trainer, settings, made_folder=made_folder)
        return trainer
    with reporting_interruptions(trainer, command=name):
        trainer.train(resume_from_checkpoint=checkpoint)
        if any(getattr(callback, "is_made", False) for callback in trainer.callback_handler.callbacks):
            trainer.accelerator.end_training()
            raise Terminated  # after the checkpoint that enable_jit_checkpoint asks for
        source, newest = script_args.dataset_name, trainer.runs.newest_checkpoint
        finish(trainer, dataset_name=source, command=name, newest=newest, has_chats=has_chats)
    return trainer


@contextmanager
def reporting_interruptions(trainer: "BaseTrainer", *, command: str) -> Iterator[None]:
    """On interruption or failure say the step and how to resume. Raises: CommandError before the first step."""
    from trl.checkpoints.wholeness import CheckpointError
    from trl.scripts.messages import interruption
    from trl.trainer.evaluation import UnknownMetric

    def message() -> str:
        step, steps = trainer.state.global_step, trainer.state.max_steps
        return interruption(trainer.runs.newest_checkpoint, trainer.args, command=command, step=step, steps=steps)

    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        stop.add_note(message())
        if trainer.accelerator.is_main_process:
            logger.warning(message())
        raise
    except Exception as error:
        if trainer.state.global_step:
            error.add_note(message())
        elif isinstance(error, (ImportError, CheckpointError, UnknownMetric)):
            raise CommandError(str(error)) from error
        raise


def load_inputs(
    script_args: ScriptArguments, training_args: "AnyConfig", model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> tuple[Any, Any]:  # fmt: skip
    """The training and the evaluation set; `training_args` then hold how the model is loaded."""
    from trl.data.formats import split_dialogue
    from trl.scripts.loading import check_processes, load_train_and_eval, model_init_kwargs

    check_processes(training_args)
    if names := unread_fields(model_args).get("use_peft"):
        effect = "has no effect without adapters: all weights would be trained"
        raise ValueError(f"{', '.join(names)} {effect}. Add --use_peft true.")
    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing. Give the folder of a model, or its name on the Hub.")
    folder = Path(model_args.model_name_or_path)
    is_adapter = (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
    if is_adapter and model_args.use_peft:
        raise ValueError(
            f"'{folder}' is an adapter, and use_peft trains another one on its merged base, which "
            "would not be saved. Merge it first (trl merge), or train it further without use_peft."
        )
    if script_args.gradient_checkpointing_use_reentrant and training_args.gradient_checkpointing:
        settings: Any = training_args.gradient_checkpointing_kwargs or {}
        training_args.set_checkpointing(True, {**settings, "use_reentrant": True})
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
    renames = script_args.renames() if isinstance(script_args, ColumnMapping) else {}
    is_evaluated = training_args.eval_strategy != "no"
    datasets = load_train_and_eval(script_args, dataset_args, renames=renames, evaluate=is_evaluated)
    if marker := getattr(script_args, "dialogue_marker", None):
        split = partial(split_dialogue, marker=marker)
        datasets = tuple(rows if rows is None else rows.map(split) for rows in datasets)
    return datasets  # type: ignore[return-value]


class TrainingCommand(NamedTuple):
    """A command: `<prefix>Trainer` and `Config` of `package`, further arguments, and a part of its usage."""

    prefix: str
    others: Callable[[Any, ModelConfig], Others] = lambda script_args, model_args: {}
    needs: str = ""
    package: str = "trl.trainer"


def classifier_adapter(script_args: ScriptArguments, model_args: ModelConfig, *, task_type: str = "SEQ_CLS") -> Others:
    """The adapter of a reward model: that of a classifier, unless `lora_task_type` is set."""
    from trl.models.peft import get_peft_config

    adapter = get_peft_config(model_args)
    if adapter is not None and adapter.task_type == ModelConfig.lora_task_type:
        adapter.task_type = task_type
    return {"peft_config": adapter}


def rewards(script_args: RewardFunctions, model_args: ModelConfig) -> Others:
    """The reward model and the reward functions, resolved from their names. Raises: ValueError if there are none."""
    if not (script_args.reward_model_name_or_path or script_args.reward_funcs):
        raise ValueError("reward_funcs is missing. Name a function (my_module.my_function) or model.")
    return rewards_or_judge(script_args, model_args)


def rewards_or_judge(script_args: RewardFunctions, model_args: ModelConfig) -> Others:
    """The reward model and the reward functions, resolved from their names; None where the config names a judge."""
    from trl.rewards import resolve_reward_funcs

    models = [script_args.reward_model_name_or_path] if script_args.reward_model_name_or_path else []
    return {"reward_funcs": [*models, *resolve_reward_funcs(script_args.reward_funcs or [])] or None}


_TEACHER, _REWARDS, _JUDGE = "--teacher_model_name_or_path TEACHER", "--reward_funcs REWARD ...", "--judge JUDGE"
COMMANDS = {
    "sft": TrainingCommand("SFT"),
    "reward": TrainingCommand("Reward", classifier_adapter),
    "dpo": TrainingCommand("DPO", lambda script_args, model_args: {"ref_model": script_args.ref_model_name_or_path}),
    "orpo": TrainingCommand("ORPO"),
    "cpo": TrainingCommand("CPO"),
    "kto": TrainingCommand("KTO"),
    "bco": TrainingCommand("BCO"),
    "prm": TrainingCommand("PRM", partial(classifier_adapter, task_type="TOKEN_CLS")),
    "gkd": TrainingCommand("GKD", needs=_TEACHER),
    "gold": TrainingCommand("GOLD", needs=_TEACHER, package="trl.experimental.gold"),
    "distillation": TrainingCommand("Distillation", needs=_TEACHER),
    "grpo": TrainingCommand("GRPO", rewards, _REWARDS),
    "online-dpo": TrainingCommand("OnlineDPO", rewards_or_judge, _JUDGE),
    "nash-md": TrainingCommand("NashMD", rewards_or_judge, _JUDGE),
    "xpo": TrainingCommand("XPO", rewards_or_judge, _JUDGE),
    "rloo": TrainingCommand("RLOO", rewards, _REWARDS),
}


def method_parser(name: str, prog: str) -> TrlParser:
    """The options of a training command, for the command `prog` that takes them too."""
    parser = import_module(f"trl.scripts.{name.replace('-', '_')}").make_parser()
    parser.prog = prog
    return parser


def build_trainer(
    name: str, script_args: CommandArguments, training_args: "AnyConfig", model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> "tuple[BaseTrainer, bool]":  # fmt: skip
    """The trainer of a command, its data sets loaded and checked, and whether rows are (or may be) conversations."""
    from trl.data.formats import is_list_of_dicts_with
    from trl.data.streaming import is_streaming
    from trl.models.peft import get_peft_config

    command = COMMANDS[name]
    module = import_module(f"{command.package}.{name.replace('-', '_')}_trainer")
    trainer_class = getattr(module, f"{command.prefix}Trainer")
    others = {"peft_config": get_peft_config(model_args), **command.others(script_args, model_args)}
    train_dataset, eval_dataset = load_inputs(script_args, training_args, model_args, dataset_args)
    if others.get("ref_model") is not None and training_args.ref_model_init_kwargs is None:
        training_args.ref_model_init_kwargs = training_args.model_init_kwargs
    others |= {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    trainer = trainer_class(model=model_args.model_name_or_path, args=training_args, **others)
    if script_args.ignore_bias_buffers:  # DistributedDataParallel does not broadcast them
        names = [name for name, buffer in trainer.model.named_buffers() if str(buffer.dtype) == "torch.bool"]
        trainer.model._ddp_params_and_buffers_to_ignore = names
    row = {"input_ids": ()} if is_streaming(train_dataset) else train_dataset[0]  # a stream is not read twice
    turns = any(is_list_of_dicts_with(value, speaker) for value in row.values() for speaker in ("role", "from"))
    return trainer, turns or any(name.endswith("input_ids") for name in row)


def training_command(name: str, module: str) -> tuple[Callable[..., "BaseTrainer"], Callable[..., TrlParser]]:
    """`main` and `make_parser` of the training command `name`, which runs if its `module` is the program."""

    def make_parser(subparsers: "argparse._SubParsersAction | None" = None) -> TrlParser:
        """The parser of the command; added to `subparsers` if given (which must build `TrlParser`s)."""
        prefix, others, needs, package = COMMANDS[name]
        config = getattr(import_module(f"{package}.{name.replace('-', '_')}_config"), f"{prefix}Config")
        usual = RewardFunctions if others is rewards_or_judge else CommandArguments
        kind = getattr(arguments, f"{prefix}ScriptArguments", usual)
        types: Any = (kind, config, ModelConfig, DatasetMixtureConfig)
        summary = ALL_COMMANDS[name].help
        if subparsers is not None:
            return subparsers.add_parser(name, help=summary, dataclass_types=types)
        words = ["trl", name, "--model_name_or_path MODEL --dataset_name DATASET", needs, "[options]"]
        indent = " " * len(f"usage: trl {name} ")
        return TrlParser(
            types,
            prog=f"trl {name}",
            usage=textwrap.fill(" ".join(filter(None, words)), width=72, subsequent_indent=indent),
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=LAUNCHING,
        )

    def main(
        script_args: CommandArguments, training_args: "AnyConfig", model_args: ModelConfig,
        dataset_args: DatasetMixtureConfig,
    ) -> "BaseTrainer":  # fmt: skip
        return train(name, script_args, training_args, model_args, dataset_args)

    if module == "__main__":
        sys.exit(run_script(make_parser(), main))
    return main, make_parser
