"""Layers that mix tokens without attention (linear attention, state spaces, convolutions) over a packed row.

Such a layer would carry its state from one sequence of the row into the next one. Its hooks cut the row into its
sequences, padded on the right, and give the layer those; each branch of a shared prompt has a copy of the prompt before
it. A layer is causal, so that padding on the right changes nothing. The decoder's segment table is not given to such
layers: hooks of the decoder keep it while it runs, and gradient checkpointing, which runs a layer again without its
decoder, has it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
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
_HOOKS = "hooks_of_packed_rows"  # attribute of modules with hooks


class _Cut(NamedTuple):
    """Tokens of a packed row in rows: `rows (B, T)` are their places in the packed row, `places (N,)` those in rows."""

    rows: Tensor
    places: Tensor

    @classmethod
    def of(cls, table: Tensor, device: torch.device) -> _Cut:
        cut = _CUTS.get(table)
        if cut is None:
            cut = _CUTS[table] = cls(*(part.to(device) for part in _cut(Segments.from_table(table))))
        return cut

    def into_one(self, values: Values) -> Values:
        """Tensors `(B, T, ...)` of a tree become `(1, N, ...)`."""

        def join(value: object) -> object:
            if not isinstance(value, Tensor) or value.shape[:2] != self.rows.shape:
                return value
            return value.flatten(0, 1)[self.places][None]

        return tree_map(join, values)


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
_RUNNING: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the cut of each tensor that a mixer is given
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


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _enter_decoder(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    table = next((leaf for leaf in _tensors((args, kwargs)) if is_table(leaf)), None)
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


def _cut(segments: Segments) -> tuple[Tensor, Tensor]:
    every, rows = list(segments), list[Tensor]()
    prompts = {prefix_start for _, _, prefix_start, prefix in every if prefix}
    starts: dict[int, int] = {}  # of a segment -> its row, and its first token there
    firsts = list[tuple[int, int]]()
    for start, length, prefix_start, prefix in every:
        if not prefix and start in prompts:
            firsts.append((-1, start))
            continue
        starts.setdefault(prefix_start if prefix else start, len(rows))
        firsts.append((len(rows), prefix))
        prompt = torch.arange(prefix_start, prefix_start + prefix)
        rows.append(torch.cat([prompt, torch.arange(start, start + length)]))
    width = max(map(len, rows))
    places = [
        torch.arange(length) + (starts[first] * width if row < 0 else row * width + first)
        for (row, first), length in zip(firsts, segments.length, strict=True)
    ]
    return pad_sequence(rows, batch_first=True), torch.cat(places)


def _before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple, dict] | None:
    table, tensors = (_ACTIVE.get() or (None,))[-1], _tensors((args, kwargs))
    if table is None or not tensors:
        return None
    cut = _Cut.of(table, tensors[0].device)
    args, kwargs = into_rows((args, kwargs), cut.rows, len(cut.places))
    uncut = set(map(id, tensors))
    for leaf in _tensors((args, kwargs)):
        if id(leaf) not in uncut:
            _RUNNING[leaf] = cut
    return args, kwargs


def _after(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], outputs: object) -> object:
    cut = next((cut for leaf in _tensors((args, kwargs)) if (cut := _RUNNING.get(leaf)) is not None), None)
    return outputs if cut is None else cut.into_one(outputs)
