"""The segments of a packed row: which tokens of one long row belong together and what they see.

A packed row holds real tokens only. A segment is a plain sequence, a shared prefix (a prompt), or a branch behind one:
a branch sees the whole prefix and itself, never its sisters, and its positions go on after the prompt.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor


class Segments:
    """The segments of one packed row, in row order, without gaps: all counts are in tokens.

    `table` `(..., S, 4)`, int64: `start, length, prefix_start, prefix_length` of each segment. A plain sequence or a
    prompt has `prefix_length` 0. A branch sees `[prefix_start, prefix_start + prefix_length)`, which must be exactly
    one earlier segment that is no branch. Raises: ValueError for gaps and empty segments too.

    >>> row = Segments.from_prefix_groups([(3, [2, 1])])
    >>> row.position_ids().tolist(), row.leaves
    ([[0, 1, 2, 3, 4, 3]], [1, 2])
    """

    table: Tensor
    """Int64 `(1, 1, S, 4)` on the CPU: the form in which a model's forward carries the segments."""
    rows: list[tuple[int, int, int, int]]
    """The same as numbers."""
    leaves: list[int]
    """The segments that end a sequence: all but the prompts that have branches."""
    total: int
    """The number of tokens of the row."""

    def __init__(self, table: Tensor | Sequence[tuple[int, int, int, int]]) -> None:
        self.table = torch.as_tensor(table, dtype=torch.int64, device="cpu").reshape(1, 1, -1, 4)
        self.start, self.length, self.prefix_start, self.prefix_length = self.table[0, 0].unbind(1)
        self.rows = [tuple(row) for row in self.table[0, 0].tolist()]
        end, numbers, prompts = 0, dict[tuple[int, int], int](), set[int]()
        for number, (start, length, *prefix) in enumerate(self.rows):
            if start != end or length < 1:
                raise ValueError(f"segment {number} must start at {end}, with tokens, got {start}, {length}.")
            if prefix[1] == 0:
                numbers[start, length] = number
            elif (prompt := numbers.get((prefix[0], prefix[1]))) is None:
                raise ValueError(f"segment {number} has no earlier plain segment at {prefix[0]}.")
            else:
                prompts.add(prompt)
            end += length
        self.leaves, self.total = [number for number in range(len(self.rows)) if number not in prompts], end

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> "Segments":
        """Plain sequences, one after another.

        >>> Segments.from_lengths([2, 3]).rows
        [(0, 2, 0, 0), (2, 3, 0, 0)]
        """
        sizes = list(map(int, lengths))
        return cls([(end - size, size, 0, 0) for end, size in zip(accumulate(sizes), sizes, strict=True)])

    @classmethod
    def from_prefix_groups(cls, groups: Iterable[tuple[int, Sequence[int]]]) -> "Segments":
        """Groups of `(prompt_length, [branch_length, ...])`, one after another; no branches: a plain sequence."""
        rows, end = list[tuple[int, int, int, int]](), 0
        for length, branches in groups:
            prompt = end, int(length)
            rows.append((*prompt, 0, 0))
            end += prompt[1]
            for branch in map(int, branches):
                rows.append((end, branch, *prompt))
                end += branch
        return cls(rows)

    def position_ids(self) -> Tensor:
        """Position of each token in its own sequence, prompt included: int64 `(1, total)`."""
        offsets = torch.repeat_interleave(self.prefix_length - self.start, self.length)
        return (torch.arange(self.total, device="cpu") + offsets)[None]

    def uses(self) -> Tensor:
        """The number of sequences of each token, int64 `(N,)`: one, or of a prompt as many as it has branches.

        >>> Segments.from_prefix_groups([(3, [2, 1])]).uses().tolist()
        [2, 2, 2, 1, 1, 1]
        """
        branches = Counter(prefix_start for _, _, prefix_start, prefix_length in self.rows if prefix_length)
        counts = torch.tensor([branches[start] or 1 for start, *_ in self.rows], device="cpu")
        return counts.repeat_interleave(self.length)
