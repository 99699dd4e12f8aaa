"""Settings of transformers that do not apply to these trainers: refused, or reset with a warning."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, NamedTuple

from accelerate import ParallelismConfig
from transformers import TrainingArguments

_LAUNCHED = "ACCELERATE_USE_PARALLELISM_CONFIG"
logger = logging.getLogger(__name__)

Action = Literal["refuse", "warn", "ignore"]
Data = Literal["any", "rows", "pairs", "rollouts"]


class Setting(NamedTuple):
    """A setting of `TrainingArguments`, or its `accelerator_config`.

    `action` applies to values other than the default, unless `applies` says otherwise; "warn" and "ignore" restore the
    default. `data` says which trainers: those of data sets ("rows"), among them those of preferences ("pairs"), and
    those that generate their own rollouts.
    """

    name: str
    data: Data
    action: Action
    text: str = ""
    applies: Callable[[Any, TrainingArguments], bool] = lambda value, args: True


def _by_several(value: Any, args: TrainingArguments) -> bool:
    return args.world_size > 1


_SMOOTHING = (
    "it belongs to transformers' own loss. The option of DPOConfig and CPOConfig for noisy labels is label_smoothing"
)
_SPLIT = "batch sizes are those of one process. Set it to False and divide the batch sizes by the number of processes"
# fmt: off
SETTINGS = (
    Setting("split_batches", "any", "refuse", _SPLIT),
    Setting("auto_find_batch_size", "any", "warn", "set per_device_train_batch_size; a smaller one with more "
            "gradient_accumulation_steps gives the same gradients"),
    Setting("average_tokens_across_devices", "any", "warn", "losses are divided by all processes' counts", _by_several),
    Setting("train_sampling_strategy", "rows", "refuse", "use 'random', 'sequential' or 'group_by_length'",
            lambda value, args: value == "batch_rebalance"),
    Setting("include_for_metrics", "rows", "refuse", "batches have no inputs per row. Leave out 'inputs'",
            lambda value, args: "inputs" in value),
    Setting("dispatch_batches", "rows", "warn", "every process reads its own rows"),
    Setting("even_batches", "rows", "warn", "every process needs as many batches as the others; evaluations count each "
            "row once", _by_several),
    Setting("use_seedable_sampler", "rows", "ignore"),  # resuming within an epoch needs it
    Setting("eval_use_gather_object", "rows", "warn", "predictions and labels are tensors"),
    Setting("label_names", "rows", "warn", "compute_metrics receives the labels in the trainer's documentation",
            lambda value, args: value != ["labels"]),
    Setting("label_smoothing_factor", "pairs", "warn", _SMOOTHING),
    Setting("label_smoothing_factor", "rollouts", "warn", "rollouts have no labels"),
    # Prompts are tokenised before the first step and drawn by seed and step; evaluations measure completions.
    *(Setting(name, "rollouts", "ignore") for name in (
        "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context", "dataloader_in_order", "dataloader_drop_last", "train_sampling_strategy",
        "ignore_data_skip", "remove_unused_columns", "label_names", "prediction_loss_only", "include_for_metrics",
        "batch_eval_metrics", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
        "dispatch_batches", "even_batches",
    )),
)
# fmt: on


def settle_inherited(args: TrainingArguments, data: Data, unexpected: Mapping[str, object] = {}) -> None:
    """Apply the table to `args`: raise ValueError for what is refused, warn of and reset what has no effect.

    Call it before the constructor of `transformers.Trainer`. Raises: TypeError for `unexpected` arguments.
    """
    if unexpected:
        raise TypeError(
            f"unexpected keyword arguments {sorted(unexpected)}. Settings are fields of {type(args).__name__}."
        )
    args.output_dir = os.path.abspath(str(args.output_dir))  # a reward may change the working directory
    if os.path.islink(args.output_dir) and not os.path.exists(args.output_dir):
        target = os.readlink(args.output_dir)
        raise ValueError(
            f"output_dir={args.output_dir!r} is a link to {target!r}, which is missing. Create that folder."
        )
    _take_sequence_parallelism(args)
    kinds = {"any", data, *(["rows"] if data == "pairs" else [])}
    for setting in SETTINGS:
        if setting.data in kinds:
            for holder in (args, args.accelerator_config):
                _settle(holder, setting, args)
    if args.accelerator_config is not None:
        args.accelerator_config.dispatch_batches = False  # type: ignore[union-attr] # None means True for streams
    if args.n_gpu > 1:  # nn.DataParallel copies the model, and the scoring forward belongs to one model
        logger.warning(
            "%d GPUs are visible to this process and 1 is used. Start one process for each, with `accelerate launch "
            "--multi_gpu` or `trl ... --num_processes`.",
            args.n_gpu,
        )
        args._n_gpu = 1


def _take_sequence_parallelism(args: Any) -> None:
    """Take over `sp_size` of accelerate's config, or `cp_size`: accelerate has DeepSpeed's and PyTorch's ways for them.

    Raises: ValueError for two sizes, and for other sizes of that config that do not fit.
    """
    config: Any = args.parallelism_config
    if config is None and os.environ.get(_LAUNCHED, "false").lower() == "true":
        config = ParallelismConfig()  # of the options of `accelerate launch`
    if config is None:
        return
    sizes = {size for size in (args.sp_size, config.sp_size, config.cp_size) if size > 1}
    if not sizes:
        return
    rows = config.dp_replicate_size * config.dp_shard_size
    (size, *others), processes = sorted(sizes), args.world_size
    if (
        others
        or config.tp_size > 1
        or rows not in (1, processes // size)
        or min(config.dp_replicate_size, rows) not in (1, rows)
    ):
        raise ValueError(
            f"parallelism_config must have one sp_size (or cp_size), no other one than sp_size={args.sp_size}, and "
            f"dp_replicate_size or dp_shard_size of {processes} processes / sp_size, got {config._sizes}."
        )
    if args.sp_size == 1 and hasattr(args, "generation_batch_size"):
        raise ValueError(f"generation_batch_size depends on sp_size. Set sp_size={size} in the config, too.")
    args.sp_size, args.parallelism_config = size, None  # weights are copied to, or sharded over, all processes
    os.environ.pop(_LAUNCHED, None)


def replace_inherited(trainer: Any) -> None:
    """Take over from the constructor of `transformers.Trainer` what these trainers do themselves."""
    # The loss comes back divided by the count over the whole step: the parent must not divide it again.
    trainer.model_accepts_loss_kwargs = trainer.loss_is_scaled_for_ga = True
    # Noise on embeddings is added inside the scoring forward, which knows each sequence's own length.
    trainer.scorer.neftune_alpha, trainer.neftune_noise_alpha = trainer.neftune_noise_alpha, None
    if trainer.args.device.type == "cpu":
        trainer.args.dataloader_pin_memory = False  # there is no device to pin for; torch would warn


def _settle(holder: Any, setting: Setting, args: TrainingArguments) -> None:
    field = next((field for field in fields(holder) if field.name == setting.name), None) if holder else None
    if field is None:
        return
    value = getattr(holder, field.name)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if value == default or (not value and not default) or not setting.applies(value, args):
        return
    shown = f"{field.name}={getattr(value, 'value', value)!r}"
    if setting.action == "refuse":
        raise ValueError(f"{shown} is not supported: {setting.text}.")
    if setting.action == "warn":
        logger.warning("%s has no effect: %s.", shown, setting.text)
    setattr(holder, field.name, default)
