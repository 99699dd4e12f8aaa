"""Processes that share the tokens of each packed row (Ulysses, arXiv:2309.14509), and what they exchange.

Each process has an equal piece of a row's tokens. Before attention an all-to-all gives it all tokens of some heads, one
after attention its own tokens of all heads. What is computed of scored tokens is gathered on every process, so that
all of them compute the same loss of all tokens; its backward pass takes the slice of the process's own tokens, times
the number of processes in the group: the mean over all processes of a run, which DDP, FSDP and DeepSpeed take, is then
the sum over a group and the mean over groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Value = TypeVar("Value")
_NUMBERS = count(1)
_GROUPS: WeakValueDictionary[int, SequenceGroup] = WeakValueDictionary()  # by the numbers that tables carry


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SequenceGroup:
    """`size` neighbouring processes of a run, of which this is process `rank`."""

    size: int
    rank: int
    processes: dist.ProcessGroup | int | None
    number: int

    @classmethod
    def of_run(cls, size: int) -> SequenceGroup:
        """The group of this process. All processes of the run must call it, in one order.

        Raises: ValueError where `size` does not divide their number.
        """
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if world % size:
            raise ValueError(
                f"sp_size must divide the number of processes, {world}, got {size}. Launch a multiple of it."
            )
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        rank, number = dist.get_rank(), next(_NUMBERS)
        group = _GROUPS[number] = cls(size, rank % size, groups[rank // size], number)
        return group

    def __deepcopy__(self, memo: object) -> SequenceGroup:
        """Itself: copies of a model that it is in, such as references, are of the same processes."""
        return self

    # ---- tokens

    def width(self, tokens: int) -> int:
        """The number of tokens of a piece; the last pieces are filled up."""
        return -(-tokens // self.size)

    def cut(self, values: Tensor, dim: int, *, filler: float = 0) -> Tensor:
        """This process's piece of values of all tokens."""
        width = self.width(values.shape[dim])
        missing = width * self.size - values.shape[dim]
        last = values.ndim - 1 - dim % values.ndim
        values = F.pad(values, (0, 0) * last + (0, missing), value=filler) if missing else values
        return values.narrow(dim, self.rank * width, width)

    # ---- tables

    def marked(self, table: Tensor, tokens: int) -> Tensor:
        """A segment table `(1, 1, S, 4)` of a row of so many tokens, of which each process has its piece."""
        return torch.cat([table, table.new_tensor([-1, tokens, self.number, 0]).expand(1, 1, 1, 4)], dim=2)

    @staticmethod
    def of_table(table: Tensor) -> tuple[SequenceGroup | None, Tensor]:
        """The group that shares the row of a table, None where one process has all of it; and the table of segments."""
        start, _, number, _ = table[0, 0, -1].tolist()
        return (_GROUPS[number], table[:, :, :-1]) if start < 0 else (None, table)

    # ---- exchange

    def exchange(self, parts: Tensor) -> Tensor:
        """Part `i` of `(size, ...)` goes to process `i`; part `i` of the result is from process `i`."""
        return _Exchange.apply(parts, self)

    def gather(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """The values `(n, ...)` of all processes, one after another; `counts` are their numbers."""
        return _Gather.apply(values, counts, self)

    def objects(self, value: Value) -> list[Value]:
        """A value of any kind of every process, such as the rows that it generated."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.processes)
        return values

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.gather(value[None], [1] * self.size).sum(dim=0)


class SharedRow(NamedTuple):
    """A packed row of so many tokens, of which each process of a group has a piece."""

    group: SequenceGroup
    tokens: int


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(slopes, ctx.group), None


def _all_to_all(parts: Tensor, group: SequenceGroup) -> Tensor:
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(received, parts.contiguous(), group=group.processes)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: Sequence[int], group: SequenceGroup) -> Tensor:
        ctx.group, ctx.counts = group, counts
        sent = values.new_zeros((max(counts), *values.shape[1:]))
        sent[: len(values)] = values
        parts = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(parts, sent, group=group.processes)
        return torch.cat([part[:length] for part, length in zip(parts, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None]:
        start = sum(ctx.counts[: ctx.group.rank])
        return slopes[start : start + ctx.counts[ctx.group.rank]] * ctx.group.size, None, None
