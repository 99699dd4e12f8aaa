"""The weights of a policy for an engine with a copy of its own, one part of the model after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from trl.generation.transformers.decoders import has_readable_weight, readable_weight
from trl.generation.transformers.phase import without_wrappers
from trl.models.distributed import fsdp2_units, gathered_modules, is_sharded, whole_shape
from trl.models.head_precision import was_untied
from trl.models.parts import causal_core, prompt_learning_unsupported
from trl.models.quantization import is_quantized

_WITHOUT_HEAD = ("gemma2",)  # models for which vLLM (0.32) has the embedding alone


@dataclass(frozen=True, slots=True)
class Piece:
    """A module's own tensors, without those of the modules inside it; or all that an adapted module stands for."""

    place: str  # its name in the model without adapters
    module: nn.Module
    is_adapted: bool

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose parameters it is read from."""
        return list(self.module.modules()) if self.is_adapted else [self.module]

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names in the model without adapters, LoRA adapters added in copies."""
        own = _summed(self.module) if self.is_adapted else own_tensors(self.module, recurse=False)
        return {self._named(name): value for name, value in own.items()}

    def described(self, describe: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
        """What `describe` makes of the tensors that give the same names, shapes and dtypes, each with the module that has it."""
        source = _source(self.module) if self.is_adapted else self.module
        found: dict[str, Tensor] = {}
        for place, module in source.named_modules() if self.is_adapted else [("", source)]:
            for name, value in _direct(module):
                found[self._named(f"{place}.{name}" if place else name)] = describe(module, value)
        return found

    def _named(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name


@torch.no_grad()
def checkpoint_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as a checkpoint of the model without adapters has them; the model itself is not changed.

    Active LoRA adapters are added to copies of the weights they belong to; all other tensors are the model's own, not
    copies. Weights must be whole: `WeightParts` gathers sharded ones.

    Raises: ValueError for adapters that are more than such a sum, and for quantised weights.
    """
    check_sendable(model)
    core = causal_core(model)
    found: dict[str, Tensor] = {}
    for piece in pieces(core):
        found |= piece.tensors()
    return revert_weight_conversion(core, found)


def check_sendable(model: nn.Module) -> None:
    """Raise ValueError where the weights of a policy are nothing that an engine with a copy of it could take. They need not be whole."""
    reason = prompt_learning_unsupported(model)
    if reason is not None:
        raise ValueError(f"{reason}, which no weight can stand for. Use LoRA, or leave use_vllm out.")
    core = causal_core(model)
    if is_quantized(core):
        raise ValueError(
            f"use_vllm=True was given with a quantised {type(core).__name__}, expected weights of 16 bits or more: those of fewer cannot "
            "be sent to vLLM with adapters added. Load the model without quantisation, or leave use_vllm out."
        )
    head: Any = core.get_output_embeddings()
    if was_untied(core) and head.weight.requires_grad:
        raise ValueError(
            f"cast_lm_head_to_fp32=True untied the head of {type(core).__name__} from its input embedding, and vLLM keeps them tied: "
            "it would sample with another head than the one that trains. Leave cast_lm_head_to_fp32 out, or train an adapter."
        )
    for name, module in core.named_modules():
        if _is_adapter(module) and not (_has_saved_copy(module) or has_readable_weight(module)):
            raise ValueError(
                f"the adapter of {name} ({type(module).__module__}.{type(module).__name__}) is no sum of weights that can be sent "
                "to vLLM, expected LoRA on linear layers, without DoRA. Use plain LoRA, or leave use_vllm out."
            )


def pieces(core: nn.Module) -> list[Piece]:
    """What a model's weights are read from, in the order of its modules.

    Tied weights come by all of their names: on a CPU, vLLM (0.32) packs a head of its own, and gets none from the embedding's.
    Where vLLM never has such a head, it takes none either.
    """
    config: Any = core.config
    left_out = "lm_head" if config.model_type in _WITHOUT_HEAD and config.tie_word_embeddings else None
    found: list[Piece] = []
    inside = None  # of an adapted module
    for place, module in core.named_modules(remove_duplicate=False):
        if inside is not None and place.startswith(inside):
            continue
        inside = f"{place}." if _is_adapter(module) else None
        if place == left_out and inside is None:
            continue
        if inside is not None or own_tensors(module, recurse=False):
            found.append(Piece(place, module, inside is not None))
    return found


def own_tensors(module: nn.Module, *, recurse: bool) -> dict[str, Tensor]:
    """Parameters and persistent buffers as `state_dict` has them, whose hooks would shard what FSDP2 gathered."""
    found: dict[str, Tensor] = {}
    for place, inner in module.named_modules(remove_duplicate=False) if recurse else [("", module)]:
        for name, value in _direct(inner):
            found[f"{place}.{name}" if place else name] = value.detach()
    return found


def _direct(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, value in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, value


def _is_adapter(module: nn.Module) -> bool:
    """Whether PEFT put a module in the place of the model's own."""
    return isinstance(module, _adapter_kinds())


def _has_saved_copy(module: nn.Module) -> bool:
    """Whether PEFT trains a copy of the whole module."""
    if not _is_adapter(module):
        return False
    from peft.utils.other import ModulesToSaveWrapper

    return isinstance(module, ModulesToSaveWrapper)


@cache
def _adapter_kinds() -> tuple[type[nn.Module], ...]:
    if find_spec("peft") is None:
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds: Any = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return kinds


def _source(module: Any) -> nn.Module:
    """The module inside an adapted one whose tensors have the names, shapes and dtypes of the adapted."""
    if not _has_saved_copy(module):
        return module if isinstance(module, nn.Linear) else module.get_base_layer()
    if module.disable_adapters or not module.active_adapters:
        return module.original_module
    return module.modules_to_save[module.active_adapters[0]]


def _summed(module: nn.Module) -> dict[str, Tensor]:
    if _has_saved_copy(module):
        return own_tensors(_source(module), recurse=True)
    pair = readable_weight(module)
    assert pair is not None  # check_sendable
    weight, bias = pair
    return {"weight": weight.detach()} | ({} if bias is None else {"bias": bias.detach()})


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
