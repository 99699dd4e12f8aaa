"""Keys and values of ended completions, for prompts that begin with the same tokens, such as an agent's next turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from trl.data.prefix_tree import Node, PrefixTree

_FEWEST = 8  # tokens; fewer are prefilled faster than they are copied
_MOST = 4096  # sequences


class Held(NamedTuple):
    """Keys and values `(heads, tokens, D)` of the first `length` tokens of a prompt, by layer."""

    length: int
    layers: Mapping[int, tuple[Tensor, Tensor]]


class Reuse:
    """The keys and values of some token sequences, at most `memory` bytes: the least recently used leave.

    A sequence that continues another one is kept in its place, so that all are leaves of a tree.
    """

    def __init__(self, memory: int) -> None:
        self.memory, self.used = memory, 0
        self._tree = PrefixTree[Held]()
        self._kept: OrderedDict[Node[Held], None] = OrderedDict()

    def longest(self, prompt: Sequence[int]) -> Held | None:
        """The longest known beginning of a prompt without its last token, whose logits are needed."""
        leaf, length = self._tree.shared(tuple(prompt[:-1]))
        if length < _FEWEST:
            return None
        while leaf.children:
            leaf = next(reversed(leaf.children.values()))  # any: all begin with what is shared
        self._kept.move_to_end(leaf)
        assert leaf.value is not None
        layers = leaf.value.layers.items()
        return Held(length, {number: (key[:, :length], value[:, :length]) for number, (key, value) in layers})

    def keep(self, ids: Sequence[int], layers: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Add a sequence in place of the one that it continues."""
        node, length = self._tree.shared(sequence := tuple(ids))
        if len(sequence) < _FEWEST or length == len(sequence):
            return
        if node.value is not None and node.depth == length:
            self._drop(node)
        self._kept[self._tree.add(sequence, Held(len(sequence), layers))] = None
        self.used += _bytes(layers)
        while self.used > self.memory or len(self._kept) > _MOST:
            self._drop(next(iter(self._kept)))

    def _drop(self, leaf: Node[Held]) -> None:
        assert leaf.value is not None
        self.used -= _bytes(leaf.value.layers)
        del self._kept[leaf]
        self._tree.remove(leaf)


def _bytes(layers: Mapping[int, tuple[Tensor, Tensor]]) -> int:
    return sum(part.nbytes for layer in layers.values() for part in layer)
