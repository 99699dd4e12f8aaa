"""Attention over a row whose tokens are spread over processes: each attends with some heads to all tokens.

A layer sends `4 N d / size` numbers per process where its key heads divide among the processes: queries, keys, values
and outputs, N tokens of width d. Key heads that do not are sent to each process whose queries need them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trl.models.packed.sequence_group import SequenceGroup

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query, key, value (1, heads, N, D), sinks (heads,)) -> (1, N, heads, D')."""


class HeadShares(NamedTuple):
    """Which heads a process takes: so many `queries`, and the key heads that these read.

    `keys`: the key heads for every process, one process after another; None: all of them, in their order. `pairs`: the
    key head, of its own, of each query head; None where equal runs of query heads read one each.
    """

    queries: int
    keys: Tensor | None
    pairs: Tensor | None


@cache
def head_shares(heads: int, key_heads: int, size: int, rank: int) -> HeadShares:
    """The shares of a layer; the last process's missing heads repeat the last one.

    >>> head_shares(4, 2, size=4, rank=1)
    HeadShares(queries=1, keys=tensor([0, 0, 1, 1]), pairs=None)
    """
    queries = -(-heads // size)
    read = torch.arange(queries * size, device="cpu").clamp(max=heads - 1) // (heads // key_heads)
    read = read.view(size, queries)
    most = max(len(row.unique()) for row in read)
    keys = (read[:, :1] + torch.arange(most, device="cpu")).clamp(max=key_heads - 1).flatten()
    pairs = read[rank] - read[rank, 0]
    in_runs = queries % most == 0 and pairs.tolist() == [head * most // queries for head in range(queries)]
    is_all = keys.tolist() == list(range(key_heads))
    return HeadShares(queries, None if is_all else keys, None if in_runs else pairs)


def over_heads(
    group: SequenceGroup, tokens: int, attend: Attend, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    """`attend` to a row of so many `tokens`; the tensors `(1, heads, n, D)` are a piece of it: `(1, n, heads, D')`."""
    heads, width = query.shape[1], query.shape[2]
    shares = head_shares(heads, key.shape[1], group.size, group.rank)
    missing = shares.queries * group.size - heads
    if missing:
        query = F.pad(query, (0, 0, 0, 0, 0, missing))
        sinks = None if sinks is None else F.pad(sinks, (0, missing))
    if sinks is not None:
        sinks = sinks[group.rank * shares.queries : (group.rank + 1) * shares.queries]
    if shares.keys is not None:
        key, value = (part[:, shares.keys.to(part.device)] for part in (key, value))
    query, key, value = (_tokens_of_some_heads(group, part)[:, :, :tokens] for part in (query, key, value))
    if shares.pairs is not None:
        key, value = (part[:, shares.pairs.to(part.device)] for part in (key, value))
    outputs = attend(query, key, value, sinks)
    outputs = F.pad(outputs, (0, 0, 0, 0, 0, width * group.size - tokens))
    received = group.exchange(outputs[0].unflatten(0, (group.size, -1)))
    return received.transpose(0, 1).flatten(1, 2)[None, :, :heads]


def _tokens_of_some_heads(group: SequenceGroup, part: Tensor) -> Tensor:
    """`(1, size * heads, n, D)` of this process's tokens to `(1, heads, size * n, D)` of all of them."""
    received = group.exchange(part[0].unflatten(0, (group.size, -1)))
    return received.transpose(0, 1).flatten(1, 2)[None]
