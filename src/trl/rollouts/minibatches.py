"""The rollout of a step as rows of tensors, and how they are cut into optimiser steps and minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rollout:
    """B responses: token ids as lists of tensors, `logps`, `values`, `advantages`, `returns`, `masks` `(B, R)`."""

    queries: list[Tensor]
    responses: list[Tensor]
    logps: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    masks: Tensor

    def take(self, rows: list[int]) -> Rollout:
        """Some rows, as narrow as the longest of them."""
        responses = [self.responses[row] for row in rows]
        width = max(map(len, responses))
        columns = (self.logps, self.values, self.advantages, self.returns, self.masks)
        return Rollout(
            [self.queries[row] for row in rows], responses, *(column[rows, :width] for column in columns)
        )


def shuffled_minibatches(rows: int, mini_batch_size: int, accumulation: int) -> Iterator[list[list[int]]]:
    """The minibatches of each optimiser step of one epoch, in an order from numpy's global generator."""
    order = np.random.permutation(rows).tolist()
    size = mini_batch_size * accumulation
    for begin in range(0, rows, size):
        step = order[begin : begin + size]
        yield [step[first : first + mini_batch_size] for first in range(0, len(step), mini_batch_size)]


def tokens_of_step(masks: Tensor, minibatches: list[list[int]], accelerator: Any) -> int:
    """Number of trained tokens of an optimiser step, of all its minibatches and processes."""
    rows = [row for minibatch in minibatches for row in minibatch]
    return int(accelerator.reduce((masks[rows] != 0).sum(), reduction="sum"))
