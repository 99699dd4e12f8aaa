"""The weights of a policy for an engine with its own copy, one part of the model after another.

accelerate's `get_state_dict` would gather the whole model on one process and leave LoRA adapters separate. Here at most
one layer is whole besides the shards, adapters are added to copies, names and shapes are known before gathering.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trl.generation.transformers.decoders import has_readable_weight, readable_weight
from trl.generation.transformers.engine import without_wrappers
from trl.models.distributed import FSDP2Module, fsdp2_units, gathered_modules, is_sharded, whole_shape
from trl.models.parts import UNTIED, causal_core, prompt_learning_unsupported
from trl.models.peft import is_quantized

_WITHOUT_HEAD = ("gemma2",)  # vLLM (0.32) has no head for them besides the embedding


def check_sendable(model: nn.Module) -> None:
    """Raise ValueError if a policy's weights cannot be sent to an engine with its own copy. They may be sharded."""
    if (reason := prompt_learning_unsupported(model)) is not None:
        raise ValueError(f"{reason}, which cannot be sent to vLLM as weights. Use LoRA, or use_vllm=False.")
    core = causal_core(model)
    if is_quantized(core):
        raise ValueError(f"use_vllm=True cannot send the weights of a quantised {type(core).__name__}.")
    head: Any = core.get_output_embeddings()
    if hasattr(core, UNTIED) and head.weight.requires_grad:
        raise ValueError("cast_lm_head_to_fp32=True untied the head, which vLLM keeps tied. Leave it out.")
    for name, module in core.named_modules():
        if _is_adapter(module) and not (_has_saved_copy(module) or has_readable_weight(module)):
            kind = type(module).__name__
            raise ValueError(f"use_vllm=True cannot send the adapter of {name} ({kind}). Use LoRA on linear layers.")


@cache
def _kinds() -> tuple[tuple[type[nn.Module], ...], tuple[type[nn.Module], ...]]:
    """The classes of adapted modules, and of those with a trained copy of the whole module (`modules_to_save`)."""
    if find_spec("peft") is None:
        return (), ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    kinds: Any = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return kinds, (ModulesToSaveWrapper,)


def _is_adapter(module: nn.Module) -> bool:
    return isinstance(module, _kinds()[0])


def _has_saved_copy(module: nn.Module) -> bool:
    return isinstance(module, _kinds()[1])


def _direct(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and persistent buffers; the hooks of `state_dict` would shard FSDP2's again."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for name, value in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, value


class Piece(NamedTuple):
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
        if self.is_adapted and shape_of is None and not _has_saved_copy(self.module):
            pair = zip(("weight", "bias"), readable_weight(self.module), strict=True)  # after `check_sendable`
            tensors = {name: x for name, x in pair if x is not None}
        else:
            source = self._without_adapters()
            inner = source.named_modules(remove_duplicate=False) if self.is_adapted else [("", source)]
            tensors = {
                f"{place}.{name}".removeprefix("."): value if shape_of is None else shape_of(module, value)
                for place, module in inner
                for name, value in _direct(module)
            }
        return {f"{self.place}.{name}".removeprefix("."): value.detach() for name, value in tensors.items()}

    def _without_adapters(self) -> nn.Module:
        module = self.module
        if not self.is_adapted:
            return module
        if not _has_saved_copy(module):
            return module if isinstance(module, nn.Linear) else module.get_base_layer()
        if module.disable_adapters or not module.active_adapters:
            return module.original_module
        return module.modules_to_save[module.active_adapters[0]]


def pieces_of(core: PreTrainedModel) -> list[Piece]:
    """The pieces of a model, in the order of its modules.

    Tied weights have all of their names, because on a CPU vLLM (0.32) needs both, if it has a head for the model.
    """
    config = core.config
    left_out = "lm_head" if config.model_type in _WITHOUT_HEAD and config.tie_word_embeddings else None
    pieces: list[Piece] = []
    inside = None  # an adapted module
    for place, module in core.named_modules(remove_duplicate=False):
        if inside is not None and place.startswith(inside):
            continue
        inside = f"{place}." if _is_adapter(module) else None
        if inside is not None or (place != left_out and next(_direct(module), None) is not None):
            pieces.append(Piece(place, module, inside is not None))
    return pieces


class WeightParts:
    """Weights by the names of a checkpoint without adapters, gathered part by part: a layer, or an FSDP2 unit.

    A process needs memory for one part besides its own shards; the process that reads also for the part's LoRA sums and
    conversions. `model` is the policy in its wrappers. Processes with shards have to go through the parts together.
    Matrices are read in `dtype`, that of mixed precision; None: in their own. Raises: ValueError as `check_sendable`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.dtype, inner = dtype, without_wrappers(model)
        check_sendable(inner)
        self.core = causal_core(inner)
        self.is_sharded = is_sharded(model)
        self._units = fsdp2_units(model) if self.is_sharded else {}
        self.parts = self._grouped()
        self.shapes: dict[str, Tensor] = {}  # of all weights, in the order of reading; on the device meta
        for part in self.parts:
            self.shapes |= self._converted(part, self._shape_of)
        pieces = pieces_of(self.core)
        whole = self._converted(pieces, self._shape_of)
        facts = [{name: (x.dtype, x.shape) for name, x in shapes.items()} for shapes in (whole, self.shapes)]
        if facts[0] != facts[1]:
            self.parts, self.shapes = [pieces], whole  # a conversion joins weights of several parts

    @contextmanager
    def read(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Names and weights, in the order of `shapes`, on the policy's devices.

        On exit the parts that were not read are gathered too, as in other processes. A sharded policy's are copies.
        """
        left = iter(self.parts)
        weights = self._weights(left)
        try:
            yield weights
        finally:
            weights.close()
            for part in left:
                with self._gathered(part):
                    pass

    def take_part(self) -> None:
        """Gather each part for the process that reads them."""
        with self.read():
            pass

    def _weights(self, left: Iterable[list[Piece]]) -> Generator[tuple[str, Tensor]]:
        for part in left:
            with self._gathered(part):
                for name, weight in self._converted(part).items():
                    yield name, weight.clone() if self.is_sharded else weight
                    del weight

    @torch.no_grad()
    def _converted(
        self, part: list[Piece], shape_of: Callable[[nn.Module, Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        tensors = {name: value for piece in part for name, value in piece.tensors(shape_of).items()}
        named = dict(revert_weight_conversion(self.core, tensors))
        if self.dtype is None:
            return named
        return {name: x.to(self.dtype) if x.ndim > 1 and x.is_floating_point() else x for name, x in named.items()}

    def _gathered(self, part: list[Piece]) -> AbstractContextManager[None]:
        modules = [module for piece in part for module in piece.modules]
        return gathered_modules(modules, self._units_of(modules))

    def _shape_of(self, module: nn.Module, value: Tensor) -> Tensor:
        return whole_shape(value, self._units.get(module))

    def _units_of(self, modules: Iterable[nn.Module]) -> list[FSDP2Module]:
        """The FSDP2 modules that shard the parameters of these modules, each once."""
        holders = [module for module in modules if next(module.parameters(recurse=False), None) is not None]
        return list(dict.fromkeys(self._units[module] for module in holders if module in self._units))

    def _grouped(self) -> list[list[Piece]]:
        """Pieces by their element of the outermost `ModuleList`, or by the FSDP2 unit if that is larger; else alone."""
        places = {module: place for place, module in self.core.named_modules()}
        lists = [place for module, place in places.items() if isinstance(module, nn.ModuleList)]
        parts: dict[str, list[Piece]] = {}
        for piece in pieces_of(self.core):
            units = [places.get(unit, "") for unit in self._units_of(piece.modules)]
            inside = [place for place in lists if piece.place.startswith(f"{place}.")]
            layers = [".".join(piece.place.split(".")[: place.count(".") + 2]) for place in inside]
            parts.setdefault(min([piece.place, *layers, *units], key=len), []).append(piece)
        return list(parts.values())
