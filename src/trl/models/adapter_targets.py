"""Targets of a new adapter, resolved on the model: `all-linear` without routers, and parameters of experts by name."""

import copy
import difflib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig

logger = logging.getLogger(__name__)

CHOOSERS = {"gate", "router", "shared_expert_gate", "indexer"}
"""Parts of a name by which modules that choose experts or keys are known in transformers."""


def resolve_targets(model: PreTrainedModel, config: "PeftConfig") -> "PeftConfig":
    """The config with targets that PEFT applies as they are; the argument is left alone.

    `all-linear`, and a LoRA config without targets for a model that PEFT has none for, become names (`linear_names`).
    Without them PEFT 0.21 adds experts and routers of some mixtures by itself and leaves their shared experts out.
    Raises: ValueError for an entry of `target_parameters` that no parameter of the model has.
    """
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
    from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND as ALL_LINEAR

    resolved = cast("LoraConfig", copy.copy(config))  # other configs have some of its fields
    modules, parameters = getattr(config, "target_modules", None), getattr(config, "target_parameters", None) or ()
    for entry in parameters:
        _check_parameter(model, entry)
    is_lora = getattr(config.peft_type, "value", config.peft_type) == "LORA"
    if modules is None and not parameters and is_lora and model.config.model_type not in DEFAULTS:
        modules = ALL_LINEAR
    if isinstance(modules, str) and modules.lower() == ALL_LINEAR:
        names = linear_names(model)
        resolved.target_modules = names = _loaded_again(model, config, names) if is_lora else names
        if is_lora and (moved := set(names).difference(_converted(model, resolved).target_modules or ())):
            resolved.target_modules = [name for name in names if name not in moved]
            resolved.target_parameters = sorted({*parameters, *(f"{name}.weight" for name in moved)})
        if not parameters and (experts := _expert_parameters(model)):
            logger.warning(
                "all-linear leaves the experts alone, which are no linear layers. To adapt them: target_parameters=%s.",
                sorted(experts),
            )
    wrapped = sorted(_converted(model, resolved).target_parameters or ()) if is_lora else []
    if wrapped and resolved.lora_dropout:
        wrapping = "lora_dropout=%g is not used: PEFT has no dropout for adapters of parameters (%s and %d others)."
        logger.warning(wrapping, resolved.lora_dropout, wrapped[0], len(wrapped) - 1)
        resolved.lora_dropout = 0.0
    return resolved


def linear_names(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers that an adapter of a whole model is for.

    Left out are heads, routers and indexers (`CHOOSERS`; Llama 4's returns a tuple, and no gradient reaches an indexer)
    and, in state spaces, all but `in_proj`: their kernels read the weights and never call the layers.
    """
    from peft.utils.constants import SEQ_CLS_HEAD_NAMES

    heads = [model.get_output_embeddings(), *(getattr(model, name, None) for name in SEQ_CLS_HEAD_NAMES)]
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or any(module is head for head in heads):
            continue
        parent, _, leaf = name.rpartition(".")
        mixer = model.get_submodule(parent)
        is_read_by_kernels = hasattr(mixer, "A_log") and hasattr(mixer, "D") and leaf != "in_proj"
        if not is_read_by_kernels and not CHOOSERS.intersection(name.split(".")):
            names.append(name)
    return names


def _converted(model: PreTrainedModel, config: "LoraConfig") -> "LoraConfig":
    """The config as PEFT changes it: names of v4's experts (`gate_proj`, …) become parameters in some mixtures."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as convert
    except ImportError:  # before PEFT 0.19
        return config
    converted = copy.deepcopy(config)
    convert(converted, model=model, conversions=None)
    return converted


def _loaded_again(model: PreTrainedModel, config: "PeftConfig", names: list[str]) -> list[str]:
    """Those names that an adapter's file has under the same name when PEFT loads it.

    PEFT applies the renaming of base checkpoints to adapters; Laguna's (transformers 5.19) spoils `shared_experts`.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers as load
    except ImportError:  # before PEFT 0.19
        return names
    saved = {f"base_model.model.{name}.lora_A.weight": torch.empty(0) for name in names}
    loaded = load(model=model, peft_config=config, adapter_state_dict=saved)
    return [name for name, key in zip(names, saved, strict=True) if key in loaded]


def _expert_parameters(model: nn.Module) -> set[str]:
    """Names, within a layer, of the tensors that hold one matrix per expert."""
    return {
        _endings([name], 3).pop() for name, value in model.named_parameters() if value.ndim == 3 and "expert" in name
    }


def _check_parameter(model: nn.Module, entry: str) -> None:
    names = [name for name, _ in model.named_parameters()]
    if any(f".{name}".endswith(f".{entry}") for name in names):
        return
    parts = entry.count(".") + 1
    near = difflib.get_close_matches(entry, _endings(names, parts) | _endings(names, parts + 1))
    raise ValueError(
        f"target_parameters has {entry!r}, but no parameter of {type(model).__name__} is called so. "
        f"Give the end of a parameter's name: {', '.join(near or sorted(_expert_parameters(model)) or names[-3:])}."
    )


def _endings(names: Iterable[str], parts: int) -> set[str]:
    return {".".join(name.split(".")[-parts:]) for name in names}
