"""Training arguments of transformers that a trainer of its own rollouts does not read: said once, and put aside."""

from __future__ import annotations

import logging
from dataclasses import MISSING, fields
from typing import Any

from transformers import TrainingArguments

logger = logging.getLogger(__name__)

_LOADING = "prompts are tokenised before the first step, and no process loads batches"
_PREDICTIONS = "an evaluation measures completions, and hands no predictions to a compute_metrics"
_LABELS = "rollouts have no labels"
# Each with the reason, or what to do instead.
_WITHOUT_EFFECT = {
    "dataloader_num_workers": _LOADING,
    "dataloader_persistent_workers": _LOADING,
    "dataloader_prefetch_factor": _LOADING,
    "dataloader_multiprocessing_context": _LOADING,
    "dataloader_in_order": _LOADING,
    "dataloader_drop_last": "no prompt is dropped, for a batch of completions may begin in one epoch and end in the next",
    "train_sampling_strategy": "prompts are drawn by the seed alone; with GRPO and RLOO shuffle_dataset=False takes them as they stand",
    "ignore_data_skip": "a run that goes on knows its prompts by its step",
    "remove_unused_columns": "reward functions are handed every column",
    "label_names": _LABELS,
    "label_smoothing_factor": _LABELS,
    "prediction_loss_only": _PREDICTIONS,
    "include_for_metrics": _PREDICTIONS,
    "batch_eval_metrics": _PREDICTIONS,
    "eval_accumulation_steps": _PREDICTIONS,
    "eval_do_concat_batches": _PREDICTIONS,
    "eval_use_gather_object": _PREDICTIONS,
    "auto_find_batch_size": "a batch of completions is cut into the sizes that are given; where memory runs out, a smaller "
    "per_device_train_batch_size with more gradient_accumulation_steps gives the same gradients",
}
_DISTRIBUTION = {"split_batches": False, "dispatch_batches": None, "even_batches": True}


def put_aside(args: TrainingArguments) -> None:
    """Say, once, which settings have no effect on rollouts, and give them their config's defaults, so that transformers does
    not act on them either.

    Call it before the constructor of `transformers.Trainer`.
    """
    defaults = {item.name: _default(item) for item in fields(args)}
    for name, reason in _WITHOUT_EFFECT.items():
        _settle(args, name, defaults[name], reason)
    if args.world_size > 1:
        reason = "a step is divided by what all processes train"
        _settle(args, "average_tokens_across_devices", True, reason)
    config: Any = args.accelerator_config
    for name, default in _DISTRIBUTION.items():
        if config is not None and hasattr(config, name):
            _settle(
                config,
                name,
                default,
                "each process knows its rows by their number",
                of="accelerator_config: ",
            )


def _settle(holder: Any, name: str, default: Any, reason: str, of: str = "") -> None:
    value = getattr(holder, name)
    if value == default or (not value and not default):
        return
    logger.warning(
        "%s%s=%r has no effect: %s. Leave it out.", of, name, getattr(value, "value", value), reason
    )
    setattr(holder, name, default)


def _default(item: Any) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()
