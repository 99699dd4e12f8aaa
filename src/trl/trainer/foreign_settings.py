"""Settings of transformers and accelerate that do nothing in a trainer of ours: said once, and put aside."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from transformers import TrainingArguments

logger = logging.getLogger(__name__)

_OF_ROWS = {
    "eval_use_gather_object": "predictions and labels are tensors",
    "label_names": "compute_metrics is given the labels that the trainer's documentation names",
}
_OWN_ROWS = "the main process would cut batches by row, and the sequences of a batch here are one row. Each process reads its own rows"
_ALIKE = (
    "a process with fewer batches would leave the others waiting. Evaluations count each row once; "
    "dataloader_drop_last=True trains on no row twice in an epoch"
)
_SEEDED = "a run that goes on within an epoch must find its order of rows again"


def put_aside(args: TrainingArguments, reasons: Mapping[str, str]) -> None:
    """Say, once, which of these settings were changed, each with the reason why it does nothing, and give them their config's
    defaults, so that transformers does not act on them either.

    Call it before the constructor of `transformers.Trainer`.
    """
    defaults = {item.name: _default(item) for item in fields(args)}
    for name, reason in reasons.items():
        settle(args, name, defaults[name], reason)
    if args.world_size > 1:
        reason = "a step's loss is divided by what all processes train in it"
        settle(args, "average_tokens_across_devices", True, reason)


def put_aside_of_rows(args: TrainingArguments, also: Mapping[str, str] | None = None) -> None:
    """`put_aside` for trainers of rows; `also`: further settings, with the reason."""
    reasons = {**_OF_ROWS, **(also or {})}
    if args.label_names == ["labels"]:  # which tells transformers what is so
        del reasons["label_names"]
    put_aside(args, reasons)


def settle_distribution(args: TrainingArguments) -> None:
    """Let every process read a data set itself and keep its own rows, as many batches as the others, in an order that seed and
    epoch alone decide."""
    config: Any = args.accelerator_config
    if config is None:
        return
    if config.dispatch_batches is not None:  # for streams None means True
        settle(config, "dispatch_batches", False, _OWN_ROWS)
    config.dispatch_batches = False
    if args.world_size > 1:
        settle(config, "even_batches", True, _ALIKE)
    settle(config, "use_seedable_sampler", True, _SEEDED)


def settle(holder: Any, name: str, default: Any, reason: str) -> None:
    """Give `holder` the default of one setting, and say so where it had another value."""
    value = getattr(holder, name)
    if value == default or (not value and not default):
        return
    logger.warning("%s=%r has no effect: %s. Leave it out.", name, getattr(value, "value", value), reason)
    setattr(holder, name, default)


def _default(item: Any) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()
