"""Layers that mix tokens without attention (linear attention, state spaces, convolutions) over a packed row.

Such a layer would carry its state from one sequence of the row into the next one. Its hooks cut the row into its
sequences, padded on the right, and give the layer those, in groups of like length; each branch of a shared prompt has a
copy of the prompt before it. A layer is causal, so that padding on the right changes nothing. The decoder's segment
table is not given to such layers: hooks of the decoder keep it while it runs, and gradient checkpointing, which runs a
layer again without its decoder, has it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from trl.models.packed.attention import is_table
from trl.models.packed.small_copy import class_of
from trl.tensors.segments import Segments

Values = TypeVar("Values")
LEAST_SAVED = 256  # tokens of padding for which a mixer is called once more
_HOOKS = "hooks_of_packed_rows"  # attribute of modules with hooks


class _Cut(NamedTuple):
    """Tokens of a packed row in groups of rows of like length.

    `groups`, each `(B, T)`, are their places in the packed row, `places (N,)` those in the flattened groups.
    """

    groups: list[Tensor]
    places: Tensor

    @classmethod
    def of(cls, table: Tensor, device: torch.device) -> _Cut:
        cut = _CUTS.get(table)
        if cut is None:
            groups, places = _cut(Segments(table))
            cut = _CUTS[table] = cls([group.to(device) for group in groups], places.to(device))
        return cut

    def into_one(self, outputs: Sequence[Values]) -> Values:
        """Tensors `(B, T, ...)` of the trees of all groups become one `(1, N, ...)`."""

        def join(first: object, *others: object) -> object:
            if not isinstance(first, Tensor) or first.shape[:2] != self.groups[0].shape:
                return first
            return torch.cat([x.flatten(0, 1) for x in (first, *others)])[self.places][None]  # type: ignore[attr-defined]

        return tree_map(join, *outputs)


def into_rows(values: Values, rows: Tensor, tokens: int) -> Values:
    """Tensors `(1, N, ...)` of a tree become `(B, T, ...)`, tables None (rows have no mask); others stay.

    `rows (B, T)` are places among the N `tokens`.
    """

    def cut(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return None if is_table(value) else value[0, rows] if value.shape[:2] == (1, tokens) else value

    return tree_map(cut, values)


_CUTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_RUNNING: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the call of each tensor that a mixer is given
_ACTIVE: ContextVar[tuple[Tensor | None, ...]] = ContextVar("tables of the decoders that run", default=())
_WHOLE: ContextVar[bool] = ContextVar("whether packed rows stay whole", default=False)


@contextmanager
def whole_rows() -> Iterator[None]:
    """A block in which packed rows are not cut."""
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def cut_into_rows(decoder: nn.Module, mixers: Collection[type[nn.Module]]) -> None:
    """Register hooks, by which all modules of these classes run on a row's sequences where the decoder has a table."""
    if not mixers:
        return
    _hook(decoder, _enter_decoder, _leave)
    for module in decoder.modules():
        if class_of(module) in mixers:
            _hook(module, _before, _after)


def _hook(module: nn.Module, before: Callable[..., object], after: Callable[..., object]) -> None:
    names: tuple[str, ...] = getattr(module, _HOOKS, ())
    if before.__name__ not in names:
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=after is _leave)
        setattr(module, _HOOKS, (*names, before.__name__))


def tensors_in(values: object) -> list[Tensor]:
    """The tensors of a tree."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _enter_decoder(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    table = next((leaf for leaf in tensors_in((args, kwargs)) if is_table(leaf)), None)
    _ACTIVE.set((*_ACTIVE.get(), None if _WHOLE.get() else table))
    for layer in module.modules():
        checkpoint = vars(layer).get("_gradient_checkpointing_func")
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpointed:
            layer._gradient_checkpointing_func = partial(_checkpointed, checkpoint)  # type: ignore[assignment]


def _checkpointed(checkpoint: Callable[..., object], layer: Callable[..., object], *args: object) -> object:
    """Gradient checkpointing of a layer, which has the table of its first run again."""
    active = _ACTIVE.get()

    def run(*inputs: object) -> object:
        token = _ACTIVE.set(active)
        try:
            return layer(*inputs)
        finally:
            _ACTIVE.reset(token)

    return checkpoint(run, *args)


def _leave(*_: object) -> None:
    _ACTIVE.set(_ACTIVE.get()[:-1])


def _cut(segments: Segments) -> tuple[list[Tensor], Tensor]:
    rows, leaves = list[Tensor](), {*segments.leaves}
    row_of: dict[int, int] = {}  # of a segment's start; a shared prompt is in the row of its first branch
    firsts = list[tuple[int, int]]()  # the start by which a segment's row is known, and its first token there
    for number, (start, length, prefix_start, prefix) in enumerate(segments.rows):
        if number not in leaves:
            firsts.append((start, 0))
            continue
        row_of[start] = len(rows)
        row_of.setdefault(prefix_start if prefix else start, len(rows))
        firsts.append((start, prefix))
        prompt = torch.arange(prefix_start, prefix_start + prefix)
        rows.append(torch.cat([prompt, torch.arange(start, start + length)]))
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]), reverse=True)
    bounds = _bounds([len(rows[row]) for row in order])
    groups, begins, tokens = list[Tensor](), dict[int, int](), 0
    for first, end in pairwise(bounds):
        group = pad_sequence([rows[row] for row in order[first:end]], batch_first=True)
        begins |= {row: tokens + number * group.shape[1] for number, row in enumerate(order[first:end])}
        groups, tokens = [*groups, group], tokens + group.numel()
    places = [
        torch.arange(length) + begins[row_of[start]] + offset
        for (start, offset), length in zip(firsts, segments.length.tolist(), strict=True)
    ]
    return groups, torch.cat(places)


def _bounds(lengths: Sequence[int]) -> list[int]:
    """Where rows of falling lengths are parted: each cut saves padding enough for one more call."""
    bounds, parts = {0, len(lengths)}, [(0, len(lengths))]
    while parts:
        first, end = parts.pop()
        saved, middle = max(((end - cut) * (lengths[first] - lengths[cut]), cut) for cut in range(first, end))
        if saved >= max(LEAST_SAVED, (end - first) * lengths[first] // 16):
            bounds.add(middle)
            parts += [(first, middle), (middle, end)]
    return sorted(bounds)


def _before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple, dict] | None:
    table, tensors = (_ACTIVE.get() or (None,))[-1], tensors_in((args, kwargs))
    if table is None or not tensors:
        return None
    cut = _Cut.of(table, tensors[0].device)
    calls = [into_rows((args, kwargs), group, len(cut.places)) for group in cut.groups]
    uncut = set(map(id, tensors))
    for leaf in tensors_in(calls[0]):
        if id(leaf) not in uncut:
            _RUNNING[leaf] = cut, calls[1:]
    return calls[0]


def _after(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], outputs: object) -> object:
    running = [call for leaf in tensors_in((args, kwargs)) if (call := _RUNNING.pop(leaf, None)) is not None]
    if not running:
        return outputs
    cut, calls = running[0]
    return cut.into_one([outputs, *(module.forward(*args, **kwargs) for args, kwargs in calls)])
