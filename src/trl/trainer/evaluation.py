"""Evaluations: rows of all processes, the user's metrics, and the metric that chooses the best checkpoint."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy

from trl.methods.method import LOSS_PARTS
from trl.models.step_state import own_rng_states
from trl.models.switches import holding, undisturbed
from trl.reporting.metrics import Processes
from trl.reporting.run_lines import SHOWN
from trl.trainer.loaders import check_lengths, in_rounds, rounds_of

logger = logging.getLogger("trl.trainer.base_trainer")


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
    """In place of `Accelerator.gather_for_metrics`: gathers what the evaluation loop of transformers has of a batch.

    That one counts rows of the data set to leave out repeated ones, and packed rows have several rows of logits. The
    loop first gathers the loss, then logits and labels `(S, ...)`, of which those of a process that `fills_up` do not
    count.
    """

    def __init__(self, processes: Processes, *, fills_up: bool) -> None:
        self._accelerator, self._copies = processes
        self._fills_up, self._loss_is_next = fills_up, True

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
        return torch.cat([part[:count] for part, count in list(parts)[:: self._copies]])


def chosen_metric(args: TrainingArguments, sets: Any) -> tuple[str | None, str] | None:
    """The evaluation set and the metric of it that `metric_for_best_model` names; None where no metric is read.

    The set is None where `eval_dataset` is a single one. Raises: ValueError for a name that is of none of several sets.
    """
    if args.metric_for_best_model is None or args.eval_strategy == IntervalStrategy.NO or sets is None:
        return None
    name = args.metric_for_best_model.removeprefix("eval_")
    if not isinstance(sets, dict):
        return None, name
    sets_named = [set_name for set_name in sets if name.startswith(f"{set_name}_")]
    if not sets_named:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is of none of the evaluation sets {list(sets)}, "
            f"whose metrics are named eval_<set>_<metric>. Set it to 'eval_{next(iter(sets))}_loss', for example."
        )
    longest = max(sets_named, key=len)
    return longest, name.removeprefix(f"{longest}_")


class UnknownMetric(ValueError):
    """`metric_for_best_model` names no metric of an evaluation."""


def check_best_metric(trainer: Any) -> None:
    """Raise UnknownMetric where an evaluation of one batch does not have the chosen metric; nothing of it is kept.

    Metrics that the trainer's class lists in `evaluation_metrics` are known without one.
    """
    chosen = chosen_metric(trainer.args, trainer.eval_dataset)
    if chosen is None or chosen[1] in trainer.evaluation_metrics:
        return
    name, metric = chosen
    args, sets = trainer.args, trainer.eval_dataset
    rows, dataset = args.per_device_eval_batch_size * args.data_processes, sets if name is None else sets[name]
    if hasattr(dataset, "take"):
        part = dataset.take(min(rows, len(dataset)) if hasattr(dataset, "__len__") else rows)
    else:
        part = Subset(dataset, range(min(rows, len(dataset))))
    prefix = "eval" if name is None else f"eval_{name}"
    with ExitStack() as stack:
        stack.enter_context(holding(trainer, "eval_dataset", part if name is None else {**sets, name: part}))
        stack.enter_context(holding(args, "dataloader_persistent_workers", False))  # their loaders are kept
        if hasattr(args, "generate_during_eval"):
            stack.enter_context(holding(args, "generate_during_eval", False))
        stack.enter_context(
            holding(trainer.callback_handler, "on_prediction_step", lambda args, state, control: control)
        )
        stack.enter_context(trainer.run_metrics.unrecorded())
        stack.enter_context(undisturbed(trainer.model))
        loader = trainer.get_eval_dataloader(name)
        metrics = trainer.evaluation_loop(loader, "metric_for_best_model", metric_key_prefix=prefix).metrics
    if f"{prefix}_{metric}" not in metrics:
        on_screen = [label for label, short in SHOWN.items() if short == metric and f"{prefix}_{label}" in metrics]
        full = f"{prefix}_{on_screen[0]}".removeprefix("eval_") if on_screen else ""
        remedy = f"The screen's {metric} is {full!r}. Set that." if full else "Choose one of them."
        raise UnknownMetric(
            f"metric_for_best_model={args.metric_for_best_model!r} is not among the metrics of an evaluation, which "
            f"are {sorted(metrics)}. {remedy}"
        )


@contextmanager
def evaluating(trainer: Any, dataloader: DataLoader, prefix: str) -> Iterator[None]:
    """A block that evaluates whole rounds of batches; random numbers of later training stay the same."""
    args, accelerator = trainer.args, trainer.accelerator
    is_half = args.bf16_full_eval or args.fp16_full_eval
    if is_half and not trainer.is_in_train and trainer.reference is not None:  # as the parent casts the policy
        trainer.reference.cast(torch.float16 if args.fp16_full_eval else torch.bfloat16)
    trainer.run_metrics.sums["eval"].drain()
    check_lengths(accelerator, dataloader.dataset, prefix)
    if trainer.reads_rounds:  # a loader of an overridden `get_eval_dataloader` too
        in_rounds(dataloader, args)
    with own_rng_states(), holding(trainer, "compute_metrics", returns_dict(trainer.compute_metrics)):
        yield


def predicted(trainer: Any, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of a batch, its predictions and its labels; those that an overridden `compute_loss` does not give are
    computed once more. Raises: ValueError where a program's `outcome` gives no predictions.
    """
    loss, outputs = trainer.compute_loss(model, batch, return_outputs=True)
    outputs = outputs if isinstance(outputs, Mapping) else {}
    predictions, labels = outputs.get(trainer._predictions), outputs.get("labels")
    if labels is None:
        labels = trainer.method.labels(batch, trainer.scoring())
    if predictions is None or labels is None:
        with trainer.run_metrics.unrecorded():
            _, predictions, labels, *_ = trainer.outcome(model, trainer.take_batch(batch), with_outputs=True)
    if predictions is None:
        raise ValueError(
            f"{type(trainer).__name__}.outcome gives no predictions, which compute_metrics needs. Return them in its "
            "Outcome, or leave compute_metrics out."
        )
    return loss.detach(), predictions.detach(), labels


def with_metrics(output: EvalLoopOutput, trainer: Any, dataloader: DataLoader, *, prefix: str) -> EvalLoopOutput:
    """The result of an evaluation with the metrics that were summed; all processes must call it.

    The loss is the sum of its parts, each a mean over units of its own. Metrics of `compute_metrics` stay.
    """
    run, rows = trainer.run_metrics, getattr(rounds_of(dataloader), "count", 0)
    # The number of a stream's rows, unless workers read it in their own processes.
    output = output._replace(num_samples=rows or output.num_samples)
    assert output.metrics is not None
    names = run.sums["eval"].state()["sums"]
    means = run.sums["eval"].drain(run.accelerator)
    parts = [means.pop(name) for name in list(means) if name.startswith(LOSS_PARTS)]
    means = trainer.method.derived({"loss": sum(parts), **means} if parts else means)
    if any(name.startswith(LOSS_PARTS) for name in names) and "loss" not in means:
        logger.warning("The %s set has no trained token: its loss is NaN.", prefix)
        output.metrics[f"{prefix}_loss"] = math.nan
    if means:
        means["num_tokens"] = run.num_tokens()
        theirs = {name: value for name, value in output.metrics.items() if name != f"{prefix}_loss"}
        output.metrics.update({**{f"{prefix}_{name}": value for name, value in means.items()}, **theirs})
    return output
