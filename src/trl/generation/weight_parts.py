"""The weights of a policy for an engine with a copy of its own, one part of the model after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from trl.generation.checkpoint_weights import Piece, check_sendable, pieces
from trl.generation.phase import without_wrappers
from trl.models.distributed import is_sharded
from trl.models.part_gathering import fsdp2_units, gathered_modules, whole_shape
from trl.models.parts import causal_core

Part = Sequence[Piece]


class WeightParts:
    """What `checkpoint_weights` gives, gathered, summed and converted by parts: a layer at a time, and what is in none by itself.

    What one FSDP2 module shards is one part. A process needs room for one part besides its own shards, the one that reads
    for what LoRA and the conversion make of it too. `model` is the policy as it is trained, in its wrappers. The parts are
    the same in all processes, which have to go through them together where weights are sharded.

    Raises: what `check_sendable` and `pieces` raise, before anything is gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = without_wrappers(model)
        check_sendable(inner)
        self.core = causal_core(inner)
        self.is_sharded = is_sharded(model)
        self._units = fsdp2_units(model) if self.is_sharded else {}
        found = pieces(self.core)
        whole, self.parts = self._described(found), _grouped(self.core, found, self._units)
        self.shapes: Mapping[
            str, Tensor
        ] = {}  # of all weights, in the order in which they are read; without data
        for part in self.parts:
            self.shapes |= self._described(part)
        if not _same(self.shapes, whole):  # a conversion that joins what is in several parts
            self.parts, self.shapes = [found], whole

    @contextmanager
    def read(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Names and weights, in the order of `shapes`, each on a device of the policy's.

        Leaving gathers the parts that were not read, as the other processes do, also after an error. Weights that
        were gathered are copies, so that each lives as long as somebody holds it.
        """
        left = iter(self.parts)
        found: Any = self._weights(left)
        try:
            yield found
        finally:
            found.close()
            for part in left:
                with self._gathered(part):
                    pass

    def take_part(self) -> None:
        """Gather each part for the process that reads them."""
        with self.read():
            pass

    def _weights(self, left: Iterable[Part]) -> Iterator[tuple[str, Tensor]]:
        names = iter(self.shapes)
        for part in left:
            with self._gathered(part):
                found = self._converted(part)
                for name in list(found):
                    yield name, self._checked(name, found.pop(name), next(names, None))

    @torch.no_grad()
    def _converted(self, part: Part) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for piece in part:
            found |= piece.tensors()
        return dict(revert_weight_conversion(self.core, found))

    @torch.no_grad()
    def _checked(self, name: str, weight: Tensor, expected: str | None) -> Tensor:
        told = None if expected is None else _facts(expected, self.shapes[expected])
        if _facts(name, weight) != told:
            raise RuntimeError(
                f"the weight {_facts(name, weight)} was read, expected the one whose shape was worked out before, {told}. Report the "
                "model and how it is sharded."
            )
        return weight.clone() if self.is_sharded else weight

    def _gathered(self, part: Part) -> AbstractContextManager[None]:
        modules = [module for piece in part for module in piece.modules]
        return gathered_modules(modules, _units_of(modules, self._units))

    def _described(self, part: Part) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for piece in part:
            found |= piece.described(lambda module, value: whole_shape(value, self._units.get(module)))
        return dict(revert_weight_conversion(self.core, found))


def _facts(name: str, weight: Tensor) -> tuple[str, torch.dtype, tuple[int, ...]]:
    return name, weight.dtype, tuple(weight.shape)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return {_facts(*each) for each in one.items()} == {_facts(*each) for each in other.items()}


def _units_of(modules: Iterable[nn.Module], units: Mapping[nn.Module, Any]) -> list[Any]:
    """The FSDP2 modules that shard the parameters of these modules, each once."""
    found = {
        units[module]: None
        for module in modules
        if module in units and next(module.parameters(recurse=False), None) is not None
    }
    return list(found)


def _grouped(core: nn.Module, found: Sequence[Piece], units: Mapping[nn.Module, Any]) -> list[Part]:
    """Pieces by the element of the outermost `ModuleList` that they lie in, else alone; those of one FSDP2 unit together."""
    layers = _layers(core)
    label: dict[Any, Any] = {}  # of a layer, a unit or a piece: what it is one part with

    def root(key: Any) -> Any:
        while label.setdefault(key, key) != key:
            key = label[key]
        return key

    keys = [_layer_of(piece.place, layers) for piece in found]
    for piece, key in zip(found, keys, strict=True):
        for unit in _units_of(piece.modules, units):
            label[root(unit)] = root(key)
    parts: dict[Any, list[Piece]] = {}
    for piece, key in zip(found, keys, strict=True):
        parts.setdefault(root(key), []).append(piece)
    return list(parts.values())


def _layers(core: nn.Module) -> set[str]:
    """The places of all elements of lists of modules."""
    lists = [
        (place, module)
        for place, module in core.named_modules(remove_duplicate=False)
        if isinstance(module, nn.ModuleList)
    ]
    return {f"{place}.{number}" for place, module in lists for number in range(len(module))}


def _layer_of(place: str, layers: set[str]) -> str:
    """The outermost layer that a place lies in; the place itself where it lies in none."""
    words = place.split(".")
    above = (".".join(words[:count]) for count in range(1, len(words)))
    return next((each for each in above if each in layers), place)
