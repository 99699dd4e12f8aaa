"""The weights of a reference as bytes: a hash of them, and a file beside a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
import xxhash
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trl.models.distributed import gathered_parameters, is_fsdp1, reshard
from trl.models.peft import is_peft_model

# Where a config came from, how it was written and by which kernel attention is computed are no part of the model.
_NO_PART_OF_THE_MODEL = (
    "_name_or_path",
    "transformers_version",
    "_attn_implementation",
    "attn_implementation",
    "architectures",
    "base_model_name_or_path",
    "inference_mode",
    "use_cache",
)


def hash_weights(module: nn.Module, *, settings: Mapping[str, Any], left_out: Container[str] = ()) -> str:
    """A hash of the names, types, shapes and bytes of a module's state and of its settings, 32 hex digits.

    `left_out` names entries of its state that do not count. Sharded weights are gathered one at a time, so all processes
    must call it; all get the main process's answer.
    """
    hasher = xxhash.xxh3_128(_as_json(settings).encode())
    for name, value in _whole_state(module):
        if name not in left_out:
            hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            _hash_bytes(hasher, value)
    return broadcast_object_list([hasher.hexdigest()])[0]


def adapter_weights(model: nn.Module) -> dict[str, str]:
    """Which of a module's parameters and buffers belong to which PEFT adapter: names to adapter names."""
    owners: dict[int, str] = {}
    for module in model.modules():
        layers = [attrgetter(name)(module) for name in getattr(module, "adapter_layer_names", ())]
        if is_peft_model(module):
            layers.append(getattr(module, "prompt_encoder", {}))
        for layer in layers:
            for adapter, part in layer.items():
                owners.update({id(tensor): adapter for tensor in _tensors(part)})
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: owners[id(tensor)] for name, tensor in named if id(tensor) in owners}


def save_parameters(module: nn.Module, file: str) -> None:
    """Write a module's parameters, whole, into a safetensors file; the main process writes, all must call it."""
    _check_format(module)
    reshard(module)
    is_main, kept = PartialState().is_main_process, {}
    for name, parameter in module.named_parameters():
        with gathered_parameters([parameter]):
            whole = _whole(parameter)
            if is_main:
                kept[name] = whole.to("cpu", copy=True).contiguous()
    if is_main:
        save_file(kept, f"{file}.incomplete")
        os.replace(f"{file}.incomplete", file)


@torch.no_grad()
def load_parameters(module: nn.Module, file: str) -> None:
    """Copy what `save_parameters` wrote into a module of the same kind, bit for bit.

    Raises: ValueError where names or shapes differ.
    """
    _check_format(module)
    reshard(module)
    saved, parameters = load_file(file), dict(module.named_parameters())
    if saved.keys() != parameters.keys():
        raise ValueError(
            f"'{file}' must hold the reference's {len(parameters)} parameters, these are in one only: "
            f"{sorted(saved.keys() ^ parameters.keys())[:3]}. Resume with the reference that the run was started with."
        )
    for name, parameter in parameters.items():
        with gathered_parameters([parameter], modifier_rank=0):
            if saved[name].shape != parameter.shape:
                raise ValueError(
                    f"'{file}': {name} has shape {tuple(saved[name].shape)}, expected {tuple(parameter.shape)}. Resume "
                    "with the reference that the run was started with."
                )
            _write(parameter, saved[name])


def _write(parameter: Tensor, value: Tensor) -> None:
    if isinstance(parameter.data, DTensor):
        value = value.to(parameter.device, parameter.dtype)
        shards = distribute_tensor(value, parameter.data.device_mesh, parameter.data.placements)
        parameter.data.to_local().copy_(shards.to_local())
    else:
        parameter.data.copy_(value)


def _whole_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    _check_format(module)
    reshard(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            continue
        parameter = parameters.get(name)
        if parameter is None or isinstance(value, DTensor):
            yield name, _whole(value)
            continue
        with gathered_parameters([parameter]):
            yield name, _whole(parameter)


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _hash_bytes(hasher: Any, value: Tensor) -> None:
    if (
        not value.is_meta and value.numel()
    ):  # on the meta device are those that the main process will send out
        hasher.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())


def _tensors(part: Any) -> list[Tensor]:
    return [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else [part]


def _as_json(settings: Mapping[str, Any]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items() if key not in _NO_PART_OF_THE_MODEL}
        if isinstance(value, (set, frozenset)):
            return sorted(map(str, value))
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(plain(settings), sort_keys=True, default=str)


def _check_format(module: nn.Module) -> None:
    if any(is_fsdp1(part) for part in module.modules()):
        raise ValueError(
            "FSDP version 1 keeps weights flattened, and a reference that is hashed or saved needs them by name. Use "
            "fsdp_version: 2 in the accelerate config."
        )
