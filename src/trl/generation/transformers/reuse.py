"""Keys and values of ended completions, for prompts that begin with the same tokens, such as an agent's next turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

_FEWEST = 8  # tokens; fewer are prefilled faster than they are copied


class Held(NamedTuple):
    """Keys and values `(heads, tokens, D)` of the first `length` tokens of a prompt, by layer."""

    length: int
    layers: Sequence[tuple[Tensor, Tensor]]


class Reuse:
    """The keys and values of some token sequences, at most `memory` bytes: the least recently used leave."""

    def __init__(self, memory: int) -> None:
        self.memory, self.used = memory, 0
        self._kept: OrderedDict[bytes, tuple[np.ndarray, Held]] = OrderedDict()

    def longest(self, prompt: Sequence[int]) -> Held | None:
        """The longest known beginning of a prompt without its last token, whose logits are needed."""
        wanted = np.array(prompt[:-1])
        best, length = None, _FEWEST - 1
        for name, (ids, _) in self._kept.items():
            if (shared := _shared(ids, wanted)) > length:
                best, length = name, shared
        if best is None:
            return None
        self._kept.move_to_end(best)
        return Held(
            length, [(key[:, :length], value[:, :length]) for key, value in self._kept[best][1].layers]
        )

    def keep(self, ids: Sequence[int], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add a sequence in place of those that it continues."""
        own = np.array(ids)
        if len(own) < _FEWEST or any(_begins(other, own) for other, _ in self._kept.values()):
            return
        for name in [name for name, (other, _) in self._kept.items() if _begins(own, other)]:
            self._drop(name)
        self._kept[own.tobytes()] = own, Held(len(own), layers)
        self.used += _bytes(layers)
        while self.used > self.memory:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: bytes) -> None:
        self.used -= _bytes(self._kept.pop(name)[1].layers)


def _shared(first: np.ndarray, second: np.ndarray) -> int:
    """The number of equal tokens at the beginning of two sequences."""
    count = min(len(first), len(second))
    differs = first[:count] != second[:count]
    return int(differs.argmax()) if differs.any() else count


def _begins(whole: np.ndarray, part: np.ndarray) -> bool:
    """Whether a sequence begins with another one."""
    last = len(part) - 1
    return len(whole) > last and whole[last] == part[last] and np.array_equal(whole[: len(part)], part)


def _bytes(layers: Sequence[tuple[Tensor, Tensor]]) -> int:
    return sum(part.numel() * part.element_size() for layer in layers for part in layer)
