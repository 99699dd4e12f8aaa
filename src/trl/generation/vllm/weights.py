"""The weights of a policy for an engine with its own copy, one part of the model after another.

accelerate's `get_state_dict` would gather the whole model on one process and leave LoRA adapters separate. Here at most one layer is
whole besides the shards, adapters are added to copies, and names and shapes are known before anything is gathered.
"""

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

_WITHOUT_HEAD = ("gemma2",)  # vLLM (0.32) has no head for them besides the embedding


def check_sendable(model: nn.Module) -> None:
    """Raise ValueError if a policy's weights cannot be sent to an engine with its own copy. They may be sharded."""
    if (reason := prompt_learning_unsupported(model)) is not None:
        raise ValueError(f"{reason}, which cannot be sent to vLLM as weights. Use LoRA, or use_vllm=False.")
    core = causal_core(model)
    if is_quantized(core):
        raise ValueError(
            f"use_vllm=True was given with a quantised {type(core).__name__}, whose weights cannot be sent to vLLM. Load the model "
            "without quantisation, or use use_vllm=False."
        )
    head: Any = core.get_output_embeddings()
    if was_untied(core) and head.weight.requires_grad:
        raise ValueError(
            f"cast_lm_head_to_fp32=True untied the head of {type(core).__name__} from its input embedding, and vLLM keeps them tied. "
            "Leave cast_lm_head_to_fp32 out, or train an adapter."
        )
    for name, module in core.named_modules():
        if _is_adapter(module) and not (_has_saved_copy(module) or has_readable_weight(module)):
            raise ValueError(
                f"the adapter of {name} ({type(module).__module__}.{type(module).__name__}) is no sum of weights that can be sent to "
                "vLLM, expected LoRA on linear layers, without DoRA. Use plain LoRA, or use_vllm=False."
            )


@cache
def _adapter_kinds() -> tuple[type[nn.Module], ...]:
    if find_spec("peft") is None:
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds: Any = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return kinds


def _is_adapter(module: nn.Module) -> bool:
    return isinstance(module, _adapter_kinds())


def _has_saved_copy(module: nn.Module) -> bool:
    """Whether PEFT trains a copy of the whole module (`modules_to_save`)."""
    if not _is_adapter(module):
        return False
    from peft.utils.other import ModulesToSaveWrapper

    return isinstance(module, ModulesToSaveWrapper)


def _direct(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of the module itself, as in `state_dict`, whose hooks would shard FSDP2's again."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, value in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, value


@dataclass(frozen=True, slots=True)
class Piece:
    """The tensors of one module without those of its submodules, or all of an adapted module."""

    place: str  # its name in the model without adapters
    module: Any
    is_adapted: bool

    @property
    def modules(self) -> list[nn.Module]:
        """The modules with the parameters that it is read from."""
        return list(self.module.modules()) if self.is_adapted else [self.module]

    def tensors(self, shape_of: Callable[[nn.Module, Tensor], Tensor] | None = None) -> dict[str, Tensor]:
        """Its tensors by their names in the model without adapters, LoRA adapters added to copies.

        With `shape_of`, what that makes of each module and its tensors of the same shape instead.
        """
        source = self._without_adapters()
        found: dict[str, Tensor] = {}
        inner = source.named_modules(remove_duplicate=False) if self.is_adapted else [("", source)]
        for place, module in inner:
            for name, value in _direct(module):
                own = value.detach() if shape_of is None else shape_of(module, value)
                found[f"{place}.{name}" if place else name] = own
        if self.is_adapted and shape_of is None and not _has_saved_copy(self.module):
            pair = readable_weight(self.module)
            assert pair is not None  # check_sendable
            found = {n: v.detach() for n, v in zip(("weight", "bias"), pair, strict=True) if v is not None}
        return {f"{self.place}.{name}" if self.place else name: value for name, value in found.items()}

    def _without_adapters(self) -> nn.Module:
        module, is_linear = self.module, isinstance(self.module, nn.Linear)
        if not self.is_adapted:
            return module
        if not _has_saved_copy(module):
            return module if is_linear else module.get_base_layer()
        if module.disable_adapters or not module.active_adapters:
            return module.original_module
        return module.modules_to_save[module.active_adapters[0]]


def pieces(core: nn.Module) -> list[Piece]:
    """The pieces of a model, in the order of its modules.

    Tied weights have all of their names, because on a CPU vLLM (0.32) needs both; only for models without a head in vLLM the
    head's is left out.
    """
    config: Any = core.config
    left_out = "lm_head" if config.model_type in _WITHOUT_HEAD and config.tie_word_embeddings else None
    found: list[Piece] = []
    inside = None  # an adapted module
    for place, module in core.named_modules(remove_duplicate=False):
        if inside is not None and place.startswith(inside):
            continue
        inside = f"{place}." if _is_adapter(module) else None
        if inside is not None or (place != left_out and next(_direct(module), None) is not None):
            found.append(Piece(place, module, inside is not None))
    return found


Part = Sequence[Piece]


class WeightParts:
    """Weights by the names of a checkpoint without adapters, gathered part by part: one layer, or one FSDP2 unit, at a time.

    A process needs memory for one part besides its own shards; the process that reads also for the part's LoRA sums and
    conversions. `model` is the policy in its wrappers. Processes with shards have to go through the parts together.

    Raises: ValueError as `check_sendable`, before anything is gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = without_wrappers(model)
        check_sendable(inner)
        self.core = causal_core(inner)
        self.is_sharded = is_sharded(model)
        self._units = fsdp2_units(model) if self.is_sharded else {}
        found = pieces(self.core)
        self.parts = _grouped(self.core, found, self._units)
        self.shapes: dict[
            str, Tensor
        ] = {}  # of all weights, in the order in which they are read; on the device meta
        for part in self.parts:
            self.shapes |= self._converted(part, self._shape_of)
        whole = self._converted(found, self._shape_of)
        by_parts, at_once = ({_facts(*each) for each in given.items()} for given in (self.shapes, whole))
        if by_parts != at_once:
            self.parts, self.shapes = [found], whole  # a conversion joins weights of several parts

    @contextmanager
    def read(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Names and weights, in the order of `shapes`, on the policy's devices.

        On exit the parts that were not read are gathered too, as in the other processes, also after an error. Weights of a
        sharded policy are copies.
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
                    weight, expected = found.pop(name), next(names, "")
                    if name != expected or _facts(name, weight) != _facts(name, self.shapes[name]):
                        raise RuntimeError(
                            f"the weight {_facts(name, weight)} was read, expected {expected!r} with the shape and dtype found before. "
                            "Report the model and how it is sharded."
                        )
                    yield name, weight.detach().clone() if self.is_sharded else weight

    @torch.no_grad()
    def _converted(
        self, part: Part, shape_of: Callable[[nn.Module, Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for piece in part:
            found |= piece.tensors(shape_of)
        return dict(revert_weight_conversion(self.core, found))

    def _gathered(self, part: Part) -> AbstractContextManager[None]:
        modules = [module for piece in part for module in piece.modules]
        return gathered_modules(modules, _units_of(modules, self._units))

    def _shape_of(self, module: nn.Module, value: Tensor) -> Tensor:
        return whole_shape(value, self._units.get(module))


def _facts(name: str, weight: Tensor) -> tuple[str, torch.dtype, tuple[int, ...]]:
    return name, weight.dtype, tuple(weight.shape)


def _units_of(modules: Iterable[nn.Module], units: Mapping[nn.Module, Any]) -> list[Any]:
    """The FSDP2 modules that shard the parameters of these modules, each once."""
    return list(
        dict.fromkeys(
            units[module]
            for module in modules
            if module in units and next(module.parameters(recurse=False), None) is not None
        )
    )


def _grouped(core: nn.Module, found: Sequence[Piece], units: Mapping[nn.Module, Any]) -> list[Part]:
    """Pieces by their element of the outermost `ModuleList`, else alone; those of one FSDP2 unit together."""
    layers = {
        f"{place}.{number}"
        for place, module in core.named_modules(remove_duplicate=False)
        if isinstance(module, nn.ModuleList)
        for number in range(len(module))
    }
    joined: dict[Any, Any] = {}  # a layer, a unit or a piece -> one that it is one part with

    def root(key: Any) -> Any:
        while joined.setdefault(key, key) != key:
            key = joined[key]
        return key

    keys = [_layer_of(piece.place, layers) for piece in found]
    for piece, key in zip(found, keys, strict=True):
        for unit in _units_of(piece.modules, units):
            joined[root(unit)] = root(key)
    parts: dict[Any, list[Piece]] = {}
    for piece, key in zip(found, keys, strict=True):
        parts.setdefault(root(key), []).append(piece)
    return list(parts.values())


def _layer_of(place: str, layers: set[str]) -> str:
    """The outermost layer that contains a module; the module itself if none does."""
    words = place.split(".")
    above = (".".join(words[:count]) for count in range(1, len(words)))
    return next((each for each in above if each in layers), place)
