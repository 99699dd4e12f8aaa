"""Rows of different lengths in one flat tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ragged:
    """B rows, one after another: `values (K,)` and `lengths (B,)` int64, whose sum is K.

    >>> Ragged.of([[1, 2], [3]]).row(0).tolist()
    [1, 2]
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != 1 or self.lengths.ndim != 1:
            shapes = f"{tuple(self.values.shape)} and {tuple(self.lengths.shape)}"
            raise ValueError(f"values and lengths must be flat, got shapes {shapes}.")

    @classmethod
    def of(cls, rows: Sequence[Sequence[float] | Tensor], dtype: torch.dtype = torch.int64) -> "Ragged":
        """From lists or tensors, one per row."""
        parts = [torch.as_tensor(row, dtype=dtype) for row in rows]
        values = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
        return cls(values, torch.tensor([len(part) for part in parts], dtype=torch.int64))

    @classmethod
    def joined(cls, parts: "Sequence[Ragged]") -> "Ragged":
        """The rows of several, one after another.

        >>> Ragged.joined([Ragged.of([[1]]), Ragged.of([[2, 3]])]).lengths.tolist()
        [1, 2]
        """
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def row_index(self) -> Tensor:
        """The row of each value: int64 `(K,)`.

        >>> Ragged.of([[7, 7], [], [7]]).row_index.tolist()
        [0, 0, 2]
        """
        return torch.repeat_interleave(torch.arange(len(self), device=self.lengths.device), self.lengths)

    def split(self) -> tuple[Tensor, ...]:
        """One tensor per row."""
        return self.values.split(self.lengths.tolist())

    def row(self, index: int) -> Tensor:
        """The values of one row."""
        return self.split()[index]

    def positions(self, indices: Tensor) -> Tensor:
        """The positions of the values of some rows, row after row: int64, to index `values` or parallel tensors.

        >>> Ragged.of([[1, 2], [3], [4, 5]]).positions(torch.tensor([2, 0])).tolist()
        [3, 4, 0, 1]
        """
        starts = self.lengths.cumsum(0) - self.lengths
        lengths = self.lengths[indices]
        offsets = lengths.cumsum(0) - lengths
        inner = torch.arange(int(lengths.sum()), device=lengths.device)
        return inner + torch.repeat_interleave(starts[indices] - offsets, lengths)

    def take(self, indices: Tensor) -> "Ragged":
        """Some rows, in the order of `indices`.

        >>> Ragged.of([[1, 2], [3]]).take(torch.tensor([1, 0])).values.tolist()
        [3, 1, 2]
        """
        return Ragged(self.values[self.positions(indices)], self.lengths[indices])

    def padded(self, fill: float = 0) -> Tensor:
        """The rows as `(B, T)`, padded on the right.

        >>> Ragged.of([[1, 2], [3]]).padded().tolist()
        [[1, 2], [3, 0]]
        """
        table = self.values.new_full((len(self), int(self.lengths.max()) if len(self) else 0), fill)
        table[self.mask] = self.values
        return table

    @property
    def mask(self) -> Tensor:
        """True for the values in `padded`: bool `(B, T)`."""
        width = int(self.lengths.max()) if len(self) else 0
        return torch.arange(width, device=self.lengths.device)[None] < self.lengths[:, None]

    def to(self, device: torch.device | str) -> "Ragged":
        """The same on another device."""
        return Ragged(self.values.to(device), self.lengths.to(device))
