"""The segments of a packed row: which tokens of one long row belong together and what they see.

A packed row holds real tokens only. A segment is a plain sequence, a shared prefix (a prompt), or a branch behind one:
a branch sees the whole prefix and itself, never its sisters, and its positions go on after the prompt.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Segment boundaries of one packed row, in row order, without gaps: all counts are in tokens.

    A plain sequence or a prompt has `prefix_length` 0. A branch sees `[prefix_start, prefix_start + prefix_length)`,
    which must be exactly one earlier segment that is no branch. Raises: ValueError for gaps and empty segments too.

    >>> row = Segments.from_prefix_groups([(3, [2, 1])])
    >>> row.position_ids().tolist()
    [[0, 1, 2, 3, 4, 3]]
    """

    start: tuple[int, ...]
    length: tuple[int, ...]
    prefix_start: tuple[int, ...]
    prefix_length: tuple[int, ...]

    def __post_init__(self) -> None:
        end = 0
        prompts: dict[int, int] = {}
        for index, (start, length, prefix_start, prefix_length) in enumerate(self):
            if start != end or length < 1:
                raise ValueError(f"segment {index} must start at {end}, with tokens, got {start}, {length}.")
            if prefix_length == 0:
                prompts[start] = length
            elif prompts.get(prefix_start) != prefix_length:
                raise ValueError(f"segment {index} has no earlier plain segment at {prefix_start}.")
            end += length

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> "Segments":
        """Plain sequences, one after another.

        >>> Segments.from_lengths([2, 3]).start
        (0, 2)
        """
        sizes = tuple(int(length) for length in lengths)
        zeros = (0,) * len(sizes)
        return cls(tuple(accumulate(sizes, initial=0))[:-1], sizes, zeros, zeros)

    @classmethod
    def from_prefix_groups(cls, groups: Iterable[tuple[int, Sequence[int]]]) -> "Segments":
        """Groups of `(prompt_length, [branch_length, ...])`, one after another; no branches: a plain sequence."""
        sizes: list[int] = []
        prefixes: list[tuple[int, int]] = []
        end = 0
        for prompt_length, branch_lengths in groups:
            prompt, branches = int(prompt_length), [int(length) for length in branch_lengths]
            sizes += [prompt, *branches]
            prefixes += [(0, 0)] + [(end, prompt)] * len(branches)
            end += prompt + sum(branches)
        prefix_start, prefix_length = zip(*prefixes, strict=True) if prefixes else ((), ())
        return cls(tuple(accumulate(sizes, initial=0))[:-1], tuple(sizes), prefix_start, prefix_length)

    @classmethod
    def from_table(cls, table: Tensor) -> "Segments":
        """The segments that `to_table` wrote: `(..., S, 4) -> Segments` (waits for the device if it is not the CPU)."""
        return cls(*map(tuple, table.reshape(-1, 4).T.tolist()))

    def to_table(self, device: torch.device | str | None = None) -> Tensor:
        """All four columns as one int64 tensor `(1, 1, S, 4)`: the form in which a model's forward carries them."""
        rows = [self.start, self.length, self.prefix_start, self.prefix_length]
        columns = torch.tensor(rows, dtype=torch.int64)
        return columns.T.contiguous()[None, None].to(device)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """One `(start, length, prefix_start, prefix_length)` per segment."""
        return zip(self.start, self.length, self.prefix_start, self.prefix_length, strict=True)

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total(self) -> int:
        """Number of tokens in the row."""
        return self.start[-1] + self.length[-1] if self.length else 0

    @property
    def has_shared_prefixes(self) -> bool:
        """Whether any segment sees another one."""
        return any(self.prefix_length)

    def position_ids(self) -> Tensor:
        """Position of each token in its own sequence, prompt included: int64 `(1, total)`."""
        start, length, _, prefix_length = self.to_table()[0, 0].T
        offsets = torch.repeat_interleave(prefix_length - start, length)
        return (torch.arange(len(offsets)) + offsets)[None]

    def uses(self) -> Tensor:
        """The number of sequences of each token, int64 `(N,)`: one, or of a prompt as many as it has branches.

        >>> Segments.from_prefix_groups([(3, [2, 1])]).uses().tolist()
        [2, 2, 2, 1, 1, 1]
        """
        branches = Counter(prefix_start for _, _, prefix_start, prefix_length in self if prefix_length)
        counts = torch.tensor([branches[start] or 1 for start in self.start])
        return counts.repeat_interleave(torch.tensor(self.length))
