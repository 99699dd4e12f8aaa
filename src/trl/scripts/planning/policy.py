"""The model of a run as its trainer would load it, from a config: dtype, adapters, quantised matrices."""

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trl.models.parts import causal_core, layers_of
from trl.models.peft import get_peft_config, peft_module_casting_to_bf16, prepare_peft_model, resolve_dtype
from trl.models.residuals import to_bfloat16
from trl.models.setup import ClassifierKind
from trl.models.switches import disable_dropout_in_model
from trl.scripts.planning.state import quantized_bytes, tensor_bytes

if TYPE_CHECKING:
    from trl.options.model import ModelConfig


class Unit(NamedTuple):
    """Bytes of what is gathered at once where weights are sharded, in the dtype that is computed with."""

    weights: float
    gradients: float


class PolicyBytes(NamedTuple):
    """Weights of a policy, as they are kept: quantised ones are smaller than those that are measured."""

    count: int
    kept: float
    trained: list[nn.Parameter]
    largest: float  # matrix that is dense while it is used
    whole: Unit
    layer: Unit  # the largest
    embedding: Unit
    head: Unit  # with the last norm


def build(
    config: PretrainedConfig, args: Any, model_args: "ModelConfig", classifier: ClassifierKind | None = None
) -> nn.Module:
    """A policy, or a classifier, with this config, on the meta device."""
    model: Any = meta_model(config, weights_dtype(config, args, model_args), classifier)
    adapter = get_peft_config(model_args)
    if adapter is not None and classifier is not None:
        adapter.task_type = classifier.task_type
    if adapter is not None:
        model = prepare_peft_model(model, adapter, args)
    if is_quantized(model_args):
        _as_quantized(model, half=args.bf16)
    if getattr(args, "weights", None) is not None:
        to_bfloat16(model)
    if getattr(args, "disable_dropout", False):
        disable_dropout_in_model(model)
    return model


def meta_model(
    config: PretrainedConfig, dtype: torch.dtype, classifier: ClassifierKind | None = None
) -> PreTrainedModel:
    """A model with this config on the meta device."""
    kind: Any = AutoModelForCausalLM
    if classifier is not None:
        kind, config = classifier.auto, copy.deepcopy(config)
        config.num_labels = classifier.labels
    with torch.device("meta"):
        return kind.from_config(config, dtype=dtype)


def is_quantized(model_args: "ModelConfig") -> bool:
    """Whether the base is loaded in 8 or 4 bits."""
    return model_args.load_in_4bit or model_args.load_in_8bit


def saved_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype that a model beside the policy is loaded in."""
    return config.dtype or config.get_text_config().dtype or torch.float32  # type: ignore[return-value]


def weights_dtype(config: PretrainedConfig, args: Any, model_args: "ModelConfig") -> torch.dtype:
    """The dtype that a trainer loads the model in."""
    saved, wanted = saved_dtype(config), resolve_dtype(model_args.dtype)
    if is_quantized(model_args):
        return torch.bfloat16
    if isinstance(wanted, torch.dtype):
        return wanted
    if getattr(args, "weights", None) is not None and not model_args.use_peft:
        return torch.bfloat16
    trains_all = not model_args.use_peft and model_args.dtype is None
    return torch.promote_types(saved, torch.float32) if trains_all else saved


def _as_quantized(model: nn.Module, *, half: bool) -> None:
    """The dtypes of a quantised base, in place: its matrices, which are computed with in bfloat16, stay."""
    core = causal_core(model)
    matrices = {id(matrix.weight) for matrix in matrices_of(core)}
    for parameter in core.parameters():
        if id(parameter) not in matrices and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    if half:
        peft_module_casting_to_bf16(model)


def matrices_of(core: Any) -> list[nn.Linear]:
    """The linear layers that quantisation shrinks: all of the base but its head."""
    head = core.get_output_embeddings()
    return [
        module for name, module in core.named_modules()
        if isinstance(module, nn.Linear) and module is not head and "lora_" not in name
    ]  # fmt: skip


def policy_bytes(model: nn.Module, model_args: "ModelConfig", *, half: bool = False) -> PolicyBytes:
    """The bytes of a policy that is there as a whole; `half`: it computes with bfloat16 copies of its weights."""
    core: Any = causal_core(model)
    parameters, quantized, largest = [*model.parameters()], dict[Tensor, float](), 0.0
    if is_quantized(model_args):
        bits, nested = (4 if model_args.load_in_4bit else 8), model_args.use_bnb_nested_quant
        for matrix in matrices_of(core):
            quantized[matrix.weight] = quantized_bytes(matrix.weight, bits=bits, nested=nested)
            largest = max(largest, matrix.weight.nbytes)
    kept = sum(quantized.get(x, x.nbytes) for x in parameters) + tensor_bytes(model.buffers())

    def unit(tensors: Iterable[nn.Parameter]) -> Unit:
        dense = {x: x.numel() * (2 if half else x.itemsize) for x in tensors}
        weights = sum(quantized.get(x, size) for x, size in dense.items())
        return Unit(weights, sum(size for x, size in dense.items() if x.requires_grad))

    layers = layers_of(core) or nn.ModuleList()
    embedding = set(core.get_input_embeddings().parameters())
    outside = set(core.parameters()) - {*layers.parameters()}
    tied = core.get_output_embeddings() is not None and core.get_output_embeddings().weight in embedding
    return PolicyBytes(
        sum(parameter.numel() for parameter in parameters), kept, [x for x in parameters if x.requires_grad], largest,
        unit(parameters), max((unit(layer.parameters()) for layer in layers), default=Unit(0, 0)),
        unit(embedding), unit(outside if tied else outside - embedding),
    )  # fmt: skip
