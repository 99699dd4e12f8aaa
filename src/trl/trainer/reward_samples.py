"""Pairs of an evaluation set as text beside their rewards, to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import gather_object
from pandas import DataFrame

from trl.reporting.tables import print_rich_table
from trl.reporting.trackers import log_table

COLUMNS = ("chosen_text", "rejected_text", "logits")


def scored_samples(trainer: Any, count: int) -> DataFrame:
    """The first `count` pairs of a reward trainer's evaluation set: both texts, and both rewards to four decimals.

    Raises: ValueError without an evaluation set.
    """
    dataset = trainer.eval_dataset
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()), None)
    if dataset is None:
        raise ValueError("visualize_samples shows pairs of eval_dataset, got None. Pass one to the trainer.")
    rows: list[tuple[str, str, list[float]]] = []
    was_training = trainer.model.training
    trainer.model.eval()
    for batch in trainer.get_eval_dataloader(dataset):
        rows += gather_object(_rows_of(trainer, trainer.take_batch(batch)))
        if len(rows) >= count:
            break
    trainer.model.train(was_training)
    return DataFrame(rows[:count], columns=list(COLUMNS))


def _rows_of(trainer: Any, batch: Any) -> list[tuple[str, str, list[float]]]:
    with torch.no_grad():
        rewards = trainer.rewards(trainer.model, batch).double().cpu()
    padded = trainer.scorer.padded_inputs(batch)
    real = zip(padded["input_ids"], padded["attention_mask"].bool(), strict=True)
    texts = trainer.processing_class.batch_decode([ids[mask] for ids, mask in real])
    pairs = [[round(value, 4) for value in pair] for pair in rewards.tolist()]
    return list(zip(texts[::2], texts[1::2], pairs, strict=True))


def print_samples(table: DataFrame, report_to: Iterable[str], *, step: int) -> None:
    """Show the table in the terminal and send it to the trackers as `completions`."""
    print_rich_table(table)
    log_table("completions", table, report_to, step=step)
