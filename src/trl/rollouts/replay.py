"""Replay buffers."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trl.rollouts.experience import Experience, concatenate, read_tensors
from trl.rollouts.schedule import rows_of_groups

logger = logging.getLogger(__name__)

_FILE = "replay_buffer.safetensors"
_SCORES = "replay_scores"


class ReplayBuffer:
    """The `max_size` entries with the highest scores; `heap` is a list of `(score, entry)`, best first.

    >>> buffer = ReplayBuffer(max_size=2)
    >>> buffer.add([0.1, 0.3, 0.2], ["a", "b", "c"])
    >>> buffer.heap
    [(0.3, 'b'), (0.2, 'c')]
    """

    def __init__(self, max_size: int) -> None:
        self.max_size, self.heap = max_size, list[tuple[float, Any]]()

    def add(self, scores: Sequence[float], data: Sequence[Any]) -> None:
        """Keep entries whose scores are among the highest; of equal ones the earlier."""
        entries = [*self.heap, *zip(scores, data, strict=True)]
        self.heap = sorted(entries, key=lambda entry: -entry[0])[: self.max_size]

    def sample(self, num_samples: int) -> list[Any]:
        """Entries drawn with replacement in proportion to their scores (torch's generator); none of an empty one."""
        if not self.heap:
            return []
        weights = torch.tensor([score for score, _ in self.heap], dtype=torch.float64)
        drawn = torch.multinomial(weights, num_samples, replacement=True)
        return [self.heap[place][1] for place in drawn.tolist()]


class GroupBuffer:
    """The `size` groups of `group_size` completions with the highest scores; of equal ones the newest.

    >>> from trl.tensors.ragged import Ragged
    >>> rows = Experience(Ragged.of([[1]] * 4), Ragged.of([[2], [3], [4], [5]]))
    >>> buffer = GroupBuffer(size=1, group_size=2)
    >>> buffer.add(rows, torch.tensor([0.5, 0.7]))
    >>> len(buffer), buffer.rows([0]).completions.values.tolist()
    (1, [4, 5])
    """

    def __init__(self, size: int, group_size: int) -> None:
        self.size, self.group_size = size, group_size
        self.clear()

    def __len__(self) -> int:
        return len(self._scores)

    def clear(self) -> None:
        """Empty the buffer."""
        self._rows: Experience | None = None
        self._scores = torch.zeros(0, dtype=torch.float64)

    def add(self, rows: Experience, scores: Tensor) -> None:
        """Keep groups, one after another in `rows`, whose `scores (g,)` are among the highest."""
        if not len(scores):
            return
        entries = [rows] if self._rows is None else [rows, self._rows]
        self._scores = torch.cat([scores.double(), self._scores])
        best = self._scores.argsort(descending=True, stable=True)[: self.size].sort().values
        self._rows, self._scores = concatenate(entries), self._scores[best]
        self._rows = self.rows(best.tolist())

    def rows(self, groups: list[int]) -> Experience:
        """The completions of some groups, in this order."""
        assert self._rows is not None
        return self._rows.take(rows_of_groups(torch.tensor(groups), self.group_size))

    def save(self, folder: str | Path) -> None:
        """Write everything into a checkpoint."""
        if self._rows is not None:
            save_file({**self._rows.state(), _SCORES: self._scores}, Path(folder) / _FILE)

    def load(self, folder: str | Path) -> None:
        """Restore what `save` wrote; the buffer is empty if there are no groups, or groups of another size."""
        self.clear()
        file = Path(folder) / _FILE
        if not file.is_file():
            return
        state = read_tensors(file)
        scores = state.pop(_SCORES)
        rows = Experience.from_state(state)
        if len(rows) == len(scores) * self.group_size:
            self.add(rows, scores)
        else:
            message = "%s has groups of another size than num_generations=%d: the replay buffer begins empty."
            logger.warning(message, file, self.group_size)
