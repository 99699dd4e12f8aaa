"""What it is worth to run a prompt once for both completions: our DPO step with and without, on prompts of some lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from benchmarks.data import Corpus, Row
from benchmarks.pair_data import pairs_of_ratio
from benchmarks.preference_tasks import make_dpo
from benchmarks.throughput import tree_operations
from benchmarks.variants import Recipe, build_model


@dataclass(frozen=True)
class Sharing:
    """Per prompt-to-completion ratio: CPU seconds of every step with and without sharing."""

    ratio: int
    seconds: dict[bool, list[float]]
    operations: float
    """Those of a step with sharing over those of one without."""

    @property
    def gain(self) -> float:
        """Seconds with sharing over those without, step by step, in the median."""
        pairs = zip(self.seconds[True], self.seconds[False], strict=True)
        return median(shared / plain for shared, plain in pairs)


def time_sharing(ratio: int, size: str, vocabulary: int, *, steps: int) -> Sharing:
    """Optimiser steps of the same batches in turn, after one that does not count.

    Raises: ValueError where the losses of a first step differ.
    """
    corpus, recipe = pairs_of_ratio(ratio, rows=8 * (steps + 1)), Recipe(steps=steps + 1)
    ours = {shared: Stepper.of(shared, size, vocabulary, corpus, recipe) for shared in (True, False)}
    seconds = seconds_in_turn(lambda shared, step: ours[shared].step(corpus.rows[8 * step : 8 * step + 8]), steps=steps)
    return Sharing(ratio, seconds, _operations_ratio(ours[True].trainer.model.config, corpus))


def seconds_in_turn(update: Callable[[bool, int], tuple[float, float]], *, steps: int) -> dict[bool, list[float]]:
    """Seconds of each of `steps` updates with sharing and without, in turn, after a first pair that does not count.

    `update(shared, step)` gives seconds and loss. Raises: ValueError where the losses of the first pair differ.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for step in range(steps + 1):
        losses = []
        for shared in (True, False) if step % 2 else (False, True):
            spent, loss = update(shared, step)
            losses.append(loss)
            if step:
                seconds[shared].append(spent)
        if step == 0 and abs(losses[0] - losses[1]) > 1e-4:
            raise ValueError(f"the first losses must agree to 1e-4, got {losses}. The layouts do not do the same work.")
    return seconds


@dataclass(frozen=True)
class Stepper:
    """A trainer and an optimiser; steps without the trainer's loop."""

    trainer: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, shared: bool, size: str, vocabulary: int, corpus: Corpus, recipe: Recipe) -> Stepper:
        trainer = make_dpo(build_model(size, vocabulary), corpus, recipe, prefix_sharing=shared)
        parameters = trainer.model.train().parameters()
        return cls(trainer, torch.optim.AdamW(parameters, lr=recipe.learning_rate, fused=True))

    def step(self, rows: Sequence[Row]) -> tuple[float, float]:
        """CPU seconds and loss of one step."""
        started = time.process_time()
        loss = self.trainer.compute_loss(self.trainer.model, self.trainer.data_collator(rows))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - started, loss.item()


def _operations_ratio(config: Any, corpus: Corpus) -> float:
    shared, plain = 0.0, 0.0
    for row in corpus.rows:
        prompt, *both = _sizes(row)
        shared += tree_operations(config, prompt, both)
        plain += sum(tree_operations(config, prompt, [length]) for length in both)
    return shared / plain


def _sizes(row: Row) -> list[int]:
    return [len(row[name]) for name in ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids")]
