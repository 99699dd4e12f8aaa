"""Which rows a rollout is made of, and which of them each optimiser step learns from: functions of the seed alone.

Nothing here is a state: a run that resumes, or that has another number of processes, asks again and is told the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_PROMPTS, _MINI_BATCHES = 0, 1  # random streams of their own


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """How a window (the rollout of one policy and all that is learned from it) is cut, in rows and optimiser steps.

    `rows`: of the window, over all processes. `mini_batches`: optimiser steps per pass over them; `passes`: how often each
    row is learned from. `micro_batches`: per optimiser step; `processes`: that share each of them. `group`: rows of each
    prompt, one after another.
    """

    rows: int
    mini_batches: int
    passes: int
    micro_batches: int
    processes: int
    group: int = 1

    @property
    def prompts(self) -> int:
        """Prompts of the window, over all processes."""
        return self.rows // self.group

    @property
    def together(self) -> int:
        """Rows of one prompt that a mini-batch gets together: whole groups, or the largest parts that go round."""
        return math.gcd(self.group, self.own_rows // self.mini_batches)

    @property
    def steps(self) -> int:
        """Optimiser steps of a window."""
        return self.mini_batches * self.passes

    @property
    def own_rows(self) -> int:
        """Rows of one process."""
        return self.rows // self.processes


def window_rows(window: int, rows: int, *, dataset: int, seed: int, shuffle: bool = True) -> list[int]:
    """The data set's rows that window number `window` is made of.

    Every pass over the `dataset` (its number of rows) is shuffled anew (in order without `shuffle`), and windows follow each
    other across passes: no row is left out, none comes twice in a pass.

    >>> first, second = (window_rows(window, 3, dataset=5, seed=0) for window in (0, 1))
    >>> sorted(first + second[:2])
    [0, 1, 2, 3, 4]
    """
    if dataset < 1:
        raise ValueError("train_dataset must have at least 1 row, got 0. Check how it was filtered.")
    found: list[int] = []
    position = window * rows
    while len(found) < rows:
        order = np.arange(dataset)
        if shuffle:
            order = _generator(seed, _PROMPTS, position // dataset).permutation(dataset)
        found += order[position % dataset :][: rows - len(found)].tolist()
        position = window * rows + len(found)
    return found


def step_rows(step: int, sizes: WindowSizes, *, window: int, process: int, seed: int) -> list[Tensor]:
    """Which of a process's own rows `(own_rows,)` each micro-batch of a window's optimiser step learns from.

    In every pass each row has its turn once. The rows of the window (in groups: `together` of them at a time) are taken in
    runs of `mini_batches`, of which each mini-batch gets one at random: so a mini-batch has the same rows however many
    processes share it, as long as each process has whole groups for every mini-batch.

    >>> sizes = WindowSizes(rows=4, mini_batches=2, passes=1, micro_batches=1, processes=1)
    >>> turns = [step_rows(step, sizes, window=0, process=0, seed=0)[0] for step in (0, 1)]
    >>> torch.cat(turns).sort().values
    tensor([0, 1, 2, 3])
    """
    number, mini_batch = divmod(step, sizes.mini_batches)
    own = torch.arange(sizes.own_rows).view(-1, sizes.mini_batches, sizes.together)
    if sizes.mini_batches > 1:
        draws = _generator(seed, _MINI_BATCHES, window, number).random(
            (len(own) * sizes.processes, sizes.mini_batches)
        )
        turns = torch.from_numpy(draws.argsort(axis=1))[process * len(own) : (process + 1) * len(own)]
        own = own.gather(1, turns[:, :, None].expand_as(own))
    return list(own[:, mini_batch].flatten().chunk(sizes.micro_batches))


def _generator(seed: int, *stream: int) -> np.random.Generator:
    """A random stream that depends on the seed and these numbers alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**63, *stream])))
