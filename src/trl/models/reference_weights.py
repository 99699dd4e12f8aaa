"""The weights of references: copies, hashes, and files in checkpoints."""

import copy
import json
import os
from collections.abc import Container, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import torch
import xxhash
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from trl.models.distributed import gathered_parameters, is_sharded, reshard
from trl.models.parts import causal_core, layers_of
from trl.models.peft import is_peft_model

Model = TypeVar("Model", bound=nn.Module)

# Names of a layer's parameters in common models: values for `pattern`.
LAYER_PATTERNS = [
    "transformer.h.{layer}",
    "model.decoder.layers.{layer}",
    "gpt_neox.layers.{layer}",
    "model.layers.{layer}",
]
# Settings that do not change what a model computes.
_NOT_HASHED = (
    "_name_or_path", "transformers_version", "_attn_implementation", "attn_implementation", "architectures",
    "base_model_name_or_path", "inference_mode", "use_cache",
)  # fmt: skip


def create_reference_model(model: Model, num_shared_layers: int | None = None, pattern: str | None = None) -> Model:
    """A frozen copy of a model, in eval mode.

    With `num_shared_layers` the parameters before that layer (embeddings, an encoder, the first layers) are shared
    instead of copied, and frozen in the policy too. `pattern` is the prefix of the names of a layer's parameters, with
    `{layer}` for its number; by default the decoder's list of layers is found. Raises: ValueError for a sharded model,
    and for a layer or pattern that does not exist.
    """
    if is_sharded(model):
        raise ValueError(f"{type(model).__name__} is sharded and cannot be copied. Copy it before.")
    shared = [] if num_shared_layers is None else _before_layer(model, num_shared_layers, pattern)
    for parameter in shared:
        parameter.requires_grad_(False)
    # A deep copy does not copy what is in its memo.
    reference = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    return reference.requires_grad_(False).eval()


def _before_layer(model: nn.Module, layer: int, pattern: str | None) -> list[nn.Parameter]:
    """The parameters before those of a layer, in the model's own order."""
    wanted = f".{(pattern or _layer_pattern(model)).format(layer=layer)}."
    parameters = list(model.named_parameters())
    first = next((i for i, (name, _) in enumerate(parameters) if wanted in f".{name}"), None)
    if first is None:
        raise ValueError(
            f"num_shared_layers={layer}: {type(model).__name__} has no parameters {wanted[1:]}*. "
            "Share fewer layers, or set pattern."
        )
    return [parameter for _, parameter in parameters[:first]]


def _layer_pattern(model: nn.Module) -> str:
    core = causal_core(model)
    layers = layers_of(core)
    if layers is None:
        raise ValueError(f"{type(core).__name__} has unknown layers. Set pattern: 'model.layers.{{layer}}'.")
    return next(f"{name}.{{layer}}" for name, module in model.named_modules() if module is layers)


def adapter_weights(model: nn.Module) -> dict[str, str]:
    """Parameters and buffers that belong to PEFT adapters: names to adapter names."""
    owners: dict[int, str] = {}
    for module in model.modules():
        layers = [attrgetter(name)(module) for name in getattr(module, "adapter_layer_names", ())]
        if is_peft_model(module):
            layers.append(getattr(module, "prompt_encoder", {}))
        for layer in layers:
            for adapter, part in layer.items():
                tensors = [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else [part]
                owners.update({id(tensor): adapter for tensor in tensors})
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: owners[id(tensor)] for name, tensor in named if id(tensor) in owners}


def hash_weights(module: nn.Module, *, settings: Mapping[str, object], left_out: Container[str] = ()) -> str:
    """A hash of the names, types, shapes and bytes of a module's state and of its settings, 32 hex digits.

    `left_out` names state entries to skip. Sharded weights are gathered one at a time, so all processes must call it;
    all get the main process's result.
    """
    hasher: Any = xxhash.xxh3_128(json.dumps(_plain(settings), sort_keys=True, default=str).encode())
    for name, value in _whole_state(module):
        if name not in left_out:
            hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            if not value.is_meta and value.numel():  # meta tensors: the main process will broadcast them
                hasher.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return broadcast_object_list([hasher.hexdigest()])[0]


def save_parameters(module: nn.Module, file: str, *, left_out: Container[str] = ()) -> None:
    """Write a module's parameters but those `left_out`, gathered, into a file. All processes must call it."""
    is_main, kept, names = PartialState().is_main_process, {}, dict(module.named_parameters())
    for name, value in _whole_state(module):
        if is_main and name in names and name not in left_out:
            kept[name] = value.to("cpu", copy=True).contiguous()
    if is_main:
        save_file(kept, f"{file}.incomplete")
        os.replace(f"{file}.incomplete", file)


@torch.no_grad()
def load_parameters(module: nn.Module, file: str, *, left_out: Container[str] = ()) -> None:
    """Copy what `save_parameters` wrote into a module, bit for bit. Raises ValueError if names or shapes differ."""
    _prepare_to_read(module)
    saved = load_file(file)
    parameters = {name: x for name, x in module.named_parameters() if name not in left_out}
    of_file = {name: tuple(value.shape) for name, value in saved.items()}
    of_module = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
    if of_file != of_module:
        different = sorted(name for name, _ in of_file.items() ^ of_module.items())[:3]
        raise ValueError(f"'{file}' must hold this run's reference, different are {different}.")
    for name, parameter in parameters.items():
        with gathered_parameters([parameter], modifier_rank=0):
            value = saved[name]
            if isinstance(parameter.data, DTensor):
                value = value.to(parameter.device, parameter.dtype)
                shards = distribute_tensor(value, parameter.data.device_mesh, parameter.data.placements)
                parameter.data.to_local().copy_(shards.to_local())
            else:
                parameter.data.copy_(value)


def _whole_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    _prepare_to_read(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            continue
        if isinstance(value, DTensor):
            yield name, value.detach().full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
            continue
        value: Any = parameters.get(name, value)
        with gathered_parameters([value]):
            yield name, value.detach()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key not in _NOT_HASHED}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _prepare_to_read(module: nn.Module) -> None:
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise ValueError("FSDP 1 flattens weights, which a reference needs by name. Use fsdp_version: 2.")
    reshard(module)
