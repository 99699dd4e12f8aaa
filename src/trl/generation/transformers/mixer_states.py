"""States of the layers that mix tokens without attention (linear attention, state spaces, convolutions) in rollouts.

They are cache layers of transformers, whose tensors have a row for each prompt, or for each completion in progress.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from trl.generation.transformers.steps import Moves, Step, fitted
from trl.models.packed.mixers import into_rows, whole_rows
from trl.models.packed.small_copy import class_of
from trl.models.parts import CACHE_NAMES, decoder_of, replaced_forward

Layer = CacheLayerMixin | LinearAttentionCacheLayerMixin
Tree = TypeVar("Tree")


class MixerStates:
    """States after G prompts and after the newest token of R rows, by layer, of layers of some `kinds`.

    Inside `running` a packed row of prompts is run in batches of prompts of one length: padding would change states.
    """

    def __init__(self, model: PreTrainedModel, kinds: frozenset[type[nn.Module]]) -> None:
        self.model = model
        modules = [part for part in decoder_of(model).modules() if class_of(part) in kinds]
        self.modules = {part: inspect.signature(part.forward) for part in modules}
        self.prompts: dict[int, Layer] = {}
        self.rows = DynamicCache(config=model.config)
        self._begun: set[int] = set()  # layers with states of rows
        self._arriving: list[tuple[Tensor, Cache]] = []  # places `(B, T)` in the packed row, and their states
        self._order = torch.zeros(0, dtype=torch.int64)  # back to that of the arriving prompts
        self._token_order = self._order  # and of their tokens in the packed row

    @contextmanager
    def running(self, step_of: Callable[[], Step | None]) -> Iterator[None]:
        """A block in which the layers use these states: of a packed row of prompts, or of the rows of a step."""
        with ExitStack() as stack, whole_rows():
            for module in self.modules:
                stack.enter_context(replaced_forward(module, partial(self._run, module, module.forward, step_of)))
            yield

    def expect_prompts(self, lengths: Sequence[int], device: torch.device) -> None:
        """Prepare for prompts, of which so many tokens come one after another in the packed row of the next forward."""
        self._settle()
        numbers = torch.tensor(lengths, device=device)
        starts, order = numbers.cumsum(0) - numbers, torch.argsort(numbers, stable=True)
        for length in sorted(set(lengths)):
            places = starts[numbers == length, None] + torch.arange(length, device=device)
            self._arriving.append((places, DynamicCache(config=self.model.config)))
        self._order = torch.argsort(order)
        self._token_order = torch.argsort(torch.cat([places.flatten() for places, _ in self._arriving]))

    def bytes_of_row(self) -> int:
        """Bytes of one prompt's states, as many as a row's."""
        self._settle()
        tensors = [part for layer in self.prompts.values() for part in tree_leaves(vars(layer))]
        return sum(part[:1].nbytes for part in tensors if isinstance(part, Tensor))

    def drop_rows(self, moves: Moves) -> None:
        """Remove rows."""
        for number in self._begun:
            self.rows.layers[number] = _mapped(partial(_without, moves), self.rows.layers[number])

    def drop_prompts(self, moves: Moves) -> None:
        """Remove prompts."""
        self._settle()
        self.prompts = {number: _mapped(partial(_without, moves), layer) for number, layer in self.prompts.items()}

    def _run(
        self, module: nn.Module, forward: Callable[..., object], step_of: Callable[[], Step | None], *args: object,
        **kwargs: object,
    ) -> object:  # fmt: skip
        """A layer's outputs for one row `(1, N, H)`, run on its prompts, or on its N rows of one token."""
        step, parts, order = step_of(), self._arriving, self._token_order
        if step is not None:
            self._enter(_number(module), step)
            parts, order = [(step.rows[:, None], self.rows)], step.rows
        call = self.modules[module].bind(*args, **kwargs)
        inputs, parameters = dict(call.arguments), call.signature.parameters
        name = next((name for name in CACHE_NAMES if name in parameters), None)
        if name is None:
            raise TypeError(f"{type(module).__name__} takes no cache")
        outputs = []
        for rows, cache in parts:
            call.arguments = {**into_rows(inputs, rows, len(order)), name: cache}
            outputs.append(forward(*call.args, **call.kwargs))
        return _mapped_tree(lambda *rows: torch.cat([part.flatten(0, 1) for part in rows])[order][None], *outputs)

    def _enter(self, number: int, step: Step) -> None:
        """Give rows that have no token yet the states of their prompts."""
        self._settle()
        entering, rows = step.entering, len(step.rows)
        if not len(entering):
            return

        def begin(states: Tensor, prompts: Tensor) -> Tensor:
            states = fitted(states, (rows, *states.shape[1:]), states)
            states[entering] = prompts[step.prompt[entering]]
            return states

        prompts = self.prompts[number]
        states = self.rows.layers[number] if number in self._begun else _mapped(lambda part: part[:0], prompts)
        self.rows.layers[number] = _mapped(begin, states, prompts)
        self._begun.add(number)

    def _settle(self) -> None:
        """Add the states of prompts that have arrived."""
        if not self._arriving:
            return
        for number in map(_number, self.modules):
            layers = [cache.layers[number] for _, cache in self._arriving]
            arrived = _mapped(lambda *parts: torch.cat(parts)[self._order], *layers)
            before = [self.prompts[number]] if number in self.prompts else []
            self.prompts[number] = _mapped(lambda *parts: torch.cat(parts), *before, arrived)
        self._arriving = []


def _number(module: nn.Module) -> int:
    number = module.layer_idx
    assert isinstance(number, int)
    return number


def _without(moves: Moves, states: Tensor) -> Tensor:
    moves.apply(states)
    return states[: moves.remaining]


def _mapped(function: Callable[..., Tensor], *layers: Layer) -> Layer:
    """A cache layer whose tensors are `function` of those of layers of the same kind."""
    layer = copy.copy(layers[0])
    vars(layer).update(_mapped_tree(function, *map(vars, layers)))
    return layer


def _mapped_tree(function: Callable[..., Tensor], *trees: Tree) -> Tree:
    """The tree whose tensors are `function` of those of trees of one form."""
    return tree_map(lambda *parts: function(*parts) if isinstance(parts[0], Tensor) else parts[0], *trees)
