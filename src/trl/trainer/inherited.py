"""How transformers' loops are adapted: settings that do not apply here, the order of rows, the rows of evaluations, the
best metric.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import BatchSampler, Subset
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import IntervalStrategy, has_length

from trl.data.streaming import StreamRounds
from trl.models.switches import holding, undisturbed

logger = logging.getLogger(__name__)

Action = Literal["refuse", "warn", "ignore"]
Data = Literal["any", "rows", "pairs", "rollouts"]


class Setting(NamedTuple):
    """A setting of `TrainingArguments`, its `accelerator_config` or its `parallelism_config`.

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


_PARALLEL = "sequences are not split over processes. Use 1, and a smaller max_length or per_device_train_batch_size"
_SMOOTHING = (
    "it belongs to transformers' own loss. The option of DPOConfig and CPOConfig for noisy labels is label_smoothing"
)
_SPLIT = "batch sizes are those of one process. Set it to False and divide the batch sizes by the number of processes"
# fmt: off
SETTINGS = (
    Setting("cp_size", "any", "refuse", _PARALLEL, lambda value, args: value > 1),
    Setting("sp_size", "any", "refuse", _PARALLEL, lambda value, args: value > 1),
    Setting("split_batches", "any", "refuse", _SPLIT),
    Setting("auto_find_batch_size", "any", "warn", "set per_device_train_batch_size; a smaller one with more "
            "gradient_accumulation_steps gives the same gradients"),
    Setting("average_tokens_across_devices", "any", "warn", "losses are divided by the counts of all processes", _by_several),
    Setting("train_sampling_strategy", "rows", "refuse", "use 'random', 'sequential' or 'group_by_length'",
            lambda value, args: value == "batch_rebalance"),
    Setting("include_for_metrics", "rows", "refuse", "batches have no inputs per row. Leave out 'inputs'",
            lambda value, args: "inputs" in value),
    Setting("dispatch_batches", "rows", "warn", "every process reads its own rows"),
    Setting("even_batches", "rows", "warn", "every process needs as many batches as the others; evaluations count each row once",
            _by_several),
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


def settle_inherited(args: TrainingArguments, data: Data) -> None:
    """Apply the table to `args`: raise ValueError for what is refused, warn of and reset what has no effect.

    Call it before the constructor of `transformers.Trainer`.
    """
    args.output_dir = os.path.abspath(str(args.output_dir))  # a reward may change the working directory
    if os.path.islink(args.output_dir) and not os.path.exists(args.output_dir):
        target = os.readlink(args.output_dir)
        raise ValueError(
            f"output_dir={args.output_dir!r} is a link to {target!r}, which is missing. Create that folder."
        )
    kinds = {"any", data, *(["rows"] if data == "pairs" else [])}
    for setting in SETTINGS:
        if setting.data in kinds:
            for holder in (args, args.accelerator_config, args.parallelism_config):
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


def _settle(holder: Any, setting: Setting, args: TrainingArguments) -> None:
    field = next((each for each in fields(holder) if each.name == setting.name), None) if holder else None
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


class GroupedByLength(LengthGroupedSampler):
    """Rows of like lengths side by side, longest first, in groups that are drawn anew in each epoch.

    The parent draws them from the process's random stream, which a run that goes on within an epoch no longer has.
    """

    def __init__(self, rows: int, lengths: list[int], *, seed: int) -> None:
        super().__init__(rows, lengths=lengths)
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw those of this epoch, counted from 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return super().__iter__()


class WholeRounds(BatchSampler):
    """Batches in rounds of one for each process; the last round is not filled with rows of the first ones.

    A process without a row in it takes the last batch's first row, which `FILLS_UP` marks.
    """

    def __init__(self, batches: BatchSampler, processes: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self.missing = 0 if batches.drop_last else -len(batches) % processes

    def __len__(self) -> int:
        return super().__len__() + self.missing

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for batch in super().__iter__():
            yield batch
        yield from [batch[:1]] * self.missing


def rounds_of(loader: Any) -> WholeRounds | StreamRounds | None:
    """The rounds that a data loader reads; None for a loader of another program."""
    stream, batches = loader.dataset, loader.batch_sampler
    stream = stream.dataset if isinstance(stream, IterableDatasetShard) else stream
    while hasattr(batches, "batch_sampler"):  # accelerate's: a process's part, or what a resumed run has left
        batches = batches.batch_sampler
    return next((x for x in (stream, batches) if isinstance(x, (WholeRounds, StreamRounds))), None)


def check_lengths(accelerator: Accelerator, dataset: Any, name: str) -> None:
    """Raise ValueError where processes have data sets of different lengths; all processes must call it."""
    if accelerator.num_processes == 1 or not has_length(dataset):
        return
    lengths: Any = accelerator.gather(torch.tensor([len(dataset)], device=accelerator.device))
    if len(lengths.unique()) > 1:
        raise ValueError(
            f"the {name} dataset must be the same in all processes, got {lengths.tolist()} rows. Give each process all rows: it reads "
            "its own part of them."
        )


def returns_dict(compute_metrics: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """`compute_metrics` that raises TypeError for another result than a dict."""
    if compute_metrics is None:
        return None

    @wraps(compute_metrics)
    def checked(*args: Any, **kwargs: Any) -> Any:
        metrics = compute_metrics(*args, **kwargs)
        if kwargs.get("compute_result", True) and not isinstance(metrics, dict):
            kind = type(metrics).__name__
            raise TypeError(f"compute_metrics must return a dict of metrics by name, got a {kind}.")
        return metrics

    return checked


class GatherRows:
    """Gathers, in place of `Accelerator.gather_for_metrics`, what the evaluation loop of transformers gathers of one
    batch.

    That one counts rows of the data set to leave out repeated ones, and packed rows have several rows of logits. The
    loop first gathers the loss, then logits and labels `(S, ...)`, of which those of a process that `fills_up` do not
    count.
    """

    def __init__(self, accelerator: Accelerator, *, fills_up: bool) -> None:
        self._accelerator, self._fills_up, self._loss_is_next = accelerator, fills_up, True

    def __call__(self, values: Any) -> Any:
        """The values of all processes, one after another."""
        if self._loss_is_next:
            self._loss_is_next = False
            return self._accelerator.gather_for_metrics(values)
        return recursively_apply(self._gathered, values)

    def _gathered(self, values: Tensor) -> Tensor:
        if self._accelerator.num_processes == 1:
            return values
        rows = values[:0] if self._fills_up else values
        counts: Any = self._accelerator.gather(torch.tensor([len(rows)], device=rows.device))
        whole: Any = self._accelerator.gather(self._accelerator.pad_across_processes(rows, dim=0))
        parts = zip(whole.split(int(counts.max())), counts.tolist(), strict=True)
        return torch.cat([part[:count] for part, count in parts])


def chosen_metric(trainer: Any) -> tuple[str | None, str] | None:
    """The evaluation set and the metric of it that `metric_for_best_model` names; None where no metric is read.

    The set is None where `eval_dataset` is a single one. Raises: ValueError for a name that is of none of several sets.
    """
    args, sets = trainer.args, trainer.eval_dataset
    if args.metric_for_best_model is None or args.eval_strategy == IntervalStrategy.NO or sets is None:
        return None
    name = args.metric_for_best_model.removeprefix("eval_")
    if not isinstance(sets, dict):
        return None, name
    of = [each for each in sets if name.startswith(f"{each}_")]
    if not of:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is of none of the evaluation sets {list(sets)}, whose metrics are "
            f"named eval_<set>_<metric>. Set it to 'eval_{next(iter(sets))}_loss', for example."
        )
    longest = max(of, key=len)
    return longest, name.removeprefix(f"{longest}_")


def check_best_metric(trainer: Any) -> None:
    """Raise ValueError where an evaluation of one batch does not have the chosen metric; nothing of it is kept.

    Metrics that the trainer's class lists in `evaluation_metrics` are known without one.
    """
    chosen = chosen_metric(trainer)
    if chosen is None or chosen[1] in trainer.evaluation_metrics:
        return
    name, metric = chosen
    args, own = trainer.args, trainer.eval_dataset
    rows, given = args.per_device_eval_batch_size * args.world_size, own if name is None else own[name]
    if hasattr(given, "take"):
        part = given.take(min(rows, len(given)) if hasattr(given, "__len__") else rows)
    else:
        part = Subset(given, range(min(rows, len(given))))
    prefix = "eval" if name is None else f"eval_{name}"
    with ExitStack() as stack:
        stack.enter_context(holding(trainer, "eval_dataset", part if name is None else {**own, name: part}))
        stack.enter_context(holding(args, "dataloader_persistent_workers", False))  # their loaders are kept
        if hasattr(args, "generate_during_eval"):
            stack.enter_context(holding(args, "generate_during_eval", False))
        stack.enter_context(
            holding(trainer.callback_handler, "on_prediction_step", lambda args, state, control: control)
        )
        stack.enter_context(trainer.unrecorded())
        stack.enter_context(undisturbed(trainer.model))
        loader = trainer.get_eval_dataloader(name)
        found = trainer.evaluation_loop(loader, "metric_for_best_model", metric_key_prefix=prefix).metrics
    if f"{prefix}_{metric}" not in found:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is not among the metrics of an evaluation, which are "
            f"{sorted(found)}. Choose one of them."
        )
