"""A sampler that repeats: each row several times in a row, and each batch of rows several times."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from trl.options.checks import check_at_least
from trl.rollouts.schedule import pass_order


class RepeatSampler(Sampler[int]):
    """Indices of a data set in batches of `batch_size`: each index `mini_repeat_count` times, the batch `repeat_count` times.

    Every pass is shuffled anew by `torch.randperm`, in the order in which GRPO and RLOO draw their prompts with the same seed.
    Rows at the end of a pass that do not fill a batch are left out (trainers do not leave them out).

    Args:
        data_source: whose length is sampled from.
        mini_repeat_count: copies of an index, one after another (`num_generations`).
        batch_size: different indices of a batch.
        repeat_count: how often a batch comes, one after another (`num_iterations`).
        shuffle: False takes the rows as they stand.
        seed: of the order; None draws one.

    Example:
        >>> sampler = RepeatSampler(
        ...     "abcde", mini_repeat_count=2, batch_size=2, repeat_count=2, shuffle=False
        ... )
        >>> list(sampler)
        [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    """

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        counts = {
            "mini_repeat_count": mini_repeat_count,
            "batch_size": batch_size,
            "repeat_count": repeat_count,
        }
        for name, value in counts.items():
            check_at_least(name, value, minimum=1, optional=False)
        self.data_source, self.mini_repeat_count = data_source, mini_repeat_count
        self.batch_size, self.repeat_count = batch_size, repeat_count
        self.shuffle = shuffle
        self.seed = int(torch.randint(2**31, ())) if seed is None else seed
        self._pass = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be number `epoch`."""
        self._pass = epoch

    def __iter__(self) -> Iterator[int]:
        order = pass_order(self._pass, len(self.data_source), seed=self.seed, shuffle=self.shuffle)
        self._pass += 1
        for first in range(0, self._rows(), self.batch_size):
            for _ in range(self.repeat_count):
                for index in order[first : first + self.batch_size]:
                    yield from [index] * self.mini_repeat_count

    def __len__(self) -> int:
        return self._rows() * self.mini_repeat_count * self.repeat_count

    def _rows(self) -> int:
        """Different rows of a pass."""
        return len(self.data_source) // self.batch_size * self.batch_size
