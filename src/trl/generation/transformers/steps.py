"""The layout of a decoding step, and buffers whose rows move as completions end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trl.models.packed.attention import Reach


def visibility_bias(visible: Tensor) -> Tensor:
    """0 where `visible`, else a very negative number; finite, so that a part without keys is not NaN."""
    hidden = torch.finfo(torch.float32).min / 2
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, hidden)


def fitted(buffer: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """`buffer`, enlarged with zeros to at least `shape`."""
    if buffer is None:
        return like.new_zeros(shape)
    sizes = [max(pair) for pair in zip(buffer.shape, shape, strict=True)]
    return buffer if sizes == [*buffer.shape] else resized(buffer, sizes, like)


def resized(buffer: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros of this shape, with the entries that `buffer` has too."""
    fresh = like.new_zeros(shape)
    if buffer is not None:
        common = tuple(slice(min(pair)) for pair in zip(buffer.shape, shape, strict=True))
        fresh[common] = buffer[common]
    return fresh


class Moves:
    """Closes gaps in the numbering: `source` moves to `target` (int64), `remaining` of a `total` are left.

    `keep` is bool, False for those that leave.
    """

    def __init__(self, keep: Tensor) -> None:
        self.total, self.remaining = len(keep), int(keep.sum())
        self.source = keep[self.remaining :].nonzero()[:, 0] + self.remaining
        self.target = (~keep[: self.remaining]).nonzero()[:, 0]
        self.order = torch.arange(self.remaining, device=keep.device)  # the old number of each new one
        self.order[self.target] = self.source

    def apply(self, buffer: Tensor) -> None:
        """Move entries of a buffer, in place. The last ones may not be in it yet."""
        source = self.source[self.source < len(buffer)] if self.total > len(buffer) else self.source
        if len(source):
            buffer[self.target[: len(source)]] = buffer[source]


class Step:
    """The layout of one decoding step, which all layers share.

    `columns` `(R,)` is the index of each row's newest token in its completion, `prompt` `(R,)` the row's prompt,
    `lengths` `(G,)` the prompts' lengths. `per_prompt` is the maximum number of rows of one prompt, `slots` each row's
    index in a table with so many rows for each prompt; None if it is the row's number. `entering` are the rows whose
    newest token is their first.
    """

    def __init__(self, columns: Tensor, prompt: Tensor, lengths: Tensor) -> None:
        self.columns, self.prompt, self.lengths = columns, prompt, lengths
        self.width = int(columns.max()) + 1
        self.longest = int(lengths.max())
        self.level = bool((columns == self.width - 1).all())
        self.rows = torch.arange(len(columns), device=columns.device)
        self.entering = (columns == 0).nonzero()[:, 0]
        counts, order = torch.bincount(prompt, minlength=len(lengths)), torch.argsort(prompt, stable=True)
        self.per_prompt = int(counts.max())
        slots = torch.empty_like(order)
        rank = self.rows - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        slots[order] = prompt[order] * self.per_prompt + rank
        is_full = len(columns) == len(lengths) * self.per_prompt
        self.slots = None if is_full and bool((slots == self.rows).all()) else slots
        self.prompt_bias: Tensor | None = None
        if not bool((lengths == self.longest).all()):
            keys = torch.arange(self.longest, device=lengths.device)
            self.prompt_bias = visibility_bias(keys < lengths[:, None])[:, None, None]
        self._biases: dict[Reach | None, tuple[Tensor | None, Tensor | None, bool]] = {}

    def advance(self) -> None:
        """Go to the next step of the same rows."""
        self.columns, self.width, self.entering = self.columns + 1, self.width + 1, self.entering[:0]
        self._biases.clear()

    def biases(self, reach: Reach | None) -> tuple[Tensor | None, Tensor | None, bool]:
        """Attention biases of prompts and completions; whether the first is by row, because keys are out of reach."""
        reach = reach if reach and self.longest + self.width > reach.tokens else None
        if reach not in self._biases:
            columns, tokens = self.columns[:, None], torch.arange(self.width, device=self.columns.device)
            if reach is None:
                own_bias = None if self.level else visibility_bias(tokens <= columns)[:, None, None]
                self._biases[reach] = self.prompt_bias, own_bias, False
            else:
                keys = torch.arange(self.longest, device=tokens.device)
                lengths = self.lengths[self.prompt][:, None]
                first = reach.first_key(lengths + columns)
                seen = visibility_bias((keys < lengths) & (keys >= first))
                own_seen = visibility_bias((tokens <= columns) & (tokens >= first - lengths))
                self._biases[reach] = seen, own_seen[:, None, None], True
        return self._biases[reach]

    def to_slots(self, rows: Tensor) -> Tensor:
        """`(R, ...)` by prompt, `(G, per_prompt, ...)`, padded with zeros for prompts with fewer rows."""
        shape = (len(self.lengths), self.per_prompt, *rows.shape[1:])
        if self.slots is None:
            return rows.view(shape)
        table = rows.new_zeros(shape[0] * shape[1], *rows.shape[1:])
        table[self.slots] = rows
        return table.view(shape)
