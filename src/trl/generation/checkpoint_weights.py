"""The weights of a policy under the names of its checkpoints, for an engine that holds a copy of its own."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from trl.generation.fused import has_readable_weight, readable_weight
from trl.models.parts import causal_core, prompt_learning_obstacle
from trl.models.quantization import is_quantized

_WITHOUT_HEAD = ("gemma2",)  # models for which vLLM (0.32) has the embedding alone


@torch.no_grad()
def checkpoint_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as a checkpoint of the model without adapters has them; the model itself is not changed.

    Active LoRA adapters are added to copies of the weights they belong to; all other tensors are the model's own, not
    copies. Weights must be whole (see `generating`).

    Raises: ValueError for adapters that are more than such a sum, and for quantised weights.
    """
    check_sendable(model)
    core = causal_core(model)
    found = _own_tensors(core)
    for name, module in _adapted(core):
        own = f"{name}."
        for key in [key for key in found if key.startswith(own)]:
            del found[key]
        found |= {own + part: value for part, value in _summed(module).items()}
    return revert_weight_conversion(core, found)


def check_sendable(model: nn.Module) -> None:
    """Raise ValueError where the weights of a policy are nothing that an engine with a copy of it could take. They need not be whole."""
    obstacle = prompt_learning_obstacle(model)
    if obstacle is not None:
        raise ValueError(f"{obstacle}, which no weight can stand for. Use LoRA, or leave use_vllm out.")
    core = causal_core(model)
    if is_quantized(core):
        raise ValueError(
            f"use_vllm=True was given with a quantised {type(core).__name__}, expected weights of 16 bits or more: those of fewer cannot "
            "be sent to vLLM with adapters added. Load the model without quantisation, or leave use_vllm out."
        )
    for name, module in _adapted(core):
        if not (_has_saved_copy(module) or has_readable_weight(module)):
            raise ValueError(
                f"the adapter of {name} ({type(module).__module__}.{type(module).__name__}) is no sum of weights that can be sent "
                "to vLLM, expected LoRA on linear layers, without DoRA. Use plain LoRA, or leave use_vllm out."
            )


def _own_tensors(core: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as `state_dict` has them, whose hooks would shard what FSDP2 gathered.

    Tied ones by all of their names: on a CPU, vLLM (0.32) packs a head of its own, and gets none from the embedding's name. Where
    it never has one, it takes none either.
    """
    found = {name: value.detach() for name, value in core.named_parameters(remove_duplicate=False)}
    for place, module in core.named_modules(remove_duplicate=False):
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{place}.{name}" if place else name] = value
    config: Any = core.config
    if config.model_type in _WITHOUT_HEAD and config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    return found


def _adapted(core: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that PEFT put in the place of the model's own."""
    if find_spec("peft") is None:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
    return [(name, module) for name, module in core.named_modules() if isinstance(module, kinds)]  # pyright: ignore


def _has_saved_copy(module: nn.Module) -> bool:
    from peft.utils.other import ModulesToSaveWrapper

    return isinstance(module, ModulesToSaveWrapper)


def _summed(module: Any) -> dict[str, Tensor]:
    if _has_saved_copy(module):
        active = module.original_module
        if not module.disable_adapters and module.active_adapters:
            active = module.modules_to_save[module.active_adapters[0]]
        return dict(active.state_dict())
    pair = readable_weight(module)
    assert pair is not None  # check_sendable
    weight, bias = pair
    return {"weight": weight.detach()} | ({} if bias is None else {"bias": bias.detach()})
