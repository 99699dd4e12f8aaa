"""The metric by which the best checkpoint is chosen is checked before the first step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch.utils.data import Subset
from transformers.trainer_utils import IntervalStrategy

from trl.models.switches import undisturbed
from trl.trainer.row_loaders import holding


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
