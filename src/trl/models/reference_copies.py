"""Copies of a policy to hold it against, whole or sharing its lower layers."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

from trl.models.distributed import is_sharded
from trl.models.parts import causal_core

Model = TypeVar("Model", bound=nn.Module)

# How the parameters of a layer are named in common models: values for `pattern`.
LAYER_PATTERNS = [
    "transformer.h.{layer}",
    "model.decoder.layers.{layer}",
    "gpt_neox.layers.{layer}",
    "model.layers.{layer}",
]


def create_reference_model(
    model: Model, num_shared_layers: int | None = None, pattern: str | None = None
) -> Model:
    """A frozen copy of a model, in eval mode.

    With `num_shared_layers` the parameters before that layer (embeddings, an encoder, the first layers) are not copied: both
    models hold the same tensors, and they are frozen in the policy too. `pattern` says how the names of a layer's parameters
    begin, with `{layer}` for its number; by default the decoder's list of layers is found.

    Raises: ValueError for a sharded model, and for a layer or pattern that is not there.
    """
    if is_sharded(model):
        raise ValueError(
            f"{type(model).__name__} is sharded (ZeRO-3 or FSDP): a copy would hold parts of its weights. Make the reference "
            "before, or load it and pass it as ref_model."
        )
    shared = [] if num_shared_layers is None else _before_layer(model, num_shared_layers, pattern)
    for parameter in shared:
        parameter.requires_grad_(False)
    # What the memo of a deep copy holds already is taken as it is.
    reference = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    return reference.requires_grad_(False).eval()


def _before_layer(model: nn.Module, layer: int, pattern: str | None) -> list[nn.Parameter]:
    """The parameters that stand before those of a layer, in the model's own order."""
    pattern = pattern or f"{_layers_name(model)}.{{layer}}"
    wanted = f"{pattern.format(layer=layer)}."
    parameters = list(model.named_parameters())
    first = next((i for i, (name, _) in enumerate(parameters) if f".{wanted}" in f".{name}"), None)
    if first is None:
        raise ValueError(
            f"num_shared_layers is {layer}, and {type(model).__name__} has no parameters named {wanted}* . Share fewer layers "
            "than the model has, or give the pattern of its layers' names, such as 'model.layers.{layer}'."
        )
    return [parameter for _, parameter in parameters[:first]]


def _layers_name(model: nn.Module) -> str:
    """The dotted name of the list that holds the decoder's layers.

    Raises: ValueError where there is none.
    """
    core: Any = causal_core(model)
    count = core.config.get_text_config(decoder=True).num_hidden_layers
    decoder = core.get_decoder() or core.base_model
    for name, module in model.named_modules():
        inside = any(module is own for own in decoder.children())
        if inside and isinstance(module, nn.ModuleList) and len(module) == count:
            return name
    raise ValueError(
        f"the layers of {type(core).__name__} were not found. Give the pattern of their parameters' names, such as "
        "'model.layers.{layer}'."
    )
