"""Adapters and quantised bases: configs of a command line, dtypes by name, a base made ready to train an adapter."""

import logging
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, TrainingArguments

from trl.models.adapter_targets import resolve_targets
from trl.models.switches import enable_gradient_checkpointing
from trl.options.model import ModelConfig

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig

logger = logging.getLogger(__name__)

AdapterConfig: TypeAlias = "PeftConfig | None"
"""The settings of a new adapter that trains; None for none."""

_EMBEDDINGS_AND_HEADS = ("lm_head", "embed_tokens", "wte", "wpe", "score")


def require_peft() -> None:
    """Raise `ImportError` with the install command if PEFT is missing."""
    if find_spec("peft") is None:
        raise ImportError("Adapters need the peft package. Install it with `pip install 'trl[peft]'`.")


def get_peft_config(model_args: ModelConfig) -> "PeftConfig | None":
    """The LoRA config that the fields of a `ModelConfig` describe, `None` unless `use_peft`."""
    if not model_args.use_peft:
        return None
    require_peft()
    from peft import LoraConfig

    return LoraConfig(
        task_type=model_args.lora_task_type, r=model_args.lora_r, target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters, lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout, bias="none", use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora, modules_to_save=model_args.lora_modules_to_save,
    )  # fmt: skip


def is_peft_model(model: object) -> bool:
    """Whether `model` is a `PeftModel`; false where PEFT is not installed."""
    if find_spec("peft") is None:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def prepare_peft_model(
    model: PreTrainedModel, peft_config: "PeftConfig | None", args: TrainingArguments
) -> PreTrainedModel:
    """Wrap `model` with a new adapter and prepare it for training; `args` are the trainer's `TrainingArguments`.

    A quantised base is prepared first (`prepare_model_for_kbit_training`). With gradient checkpointing the embedding's
    output requires gradients, so that they reach adapters behind it. In 4-bit training with `args.bf16` the adapter is
    in bfloat16, as in QLoRA (arXiv:2305.14314). Without `peft_config` a `PeftModel`'s own adapter is trained; with it
    that adapter is merged into the base first (`merge_adapter`). Raises: ValueError for a `PeftModel` with nothing to
    train, or whose adapter cannot be merged; TypeError for another `peft_config`.
    """
    require_peft()
    from peft import PeftConfig, get_peft_model

    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        raise TypeError(f"peft_config must be a config of peft (LoraConfig(r=16)), got {peft_config!r}.")
    wrapped = is_peft_model(model)
    if wrapped and peft_config is not None:
        model, wrapped = merge_adapter(model), False  # type: ignore[arg-type]
    if wrapped and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("The PeftModel has no trainable parameter. Load its adapter with is_trainable=True.")
    forbid_inference_packing(model)
    if is_quantized(model) and not wrapped:
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=args.gradient_checkpointing,
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        )
    elif args.gradient_checkpointing and (wrapped or peft_config is not None):
        model.enable_input_require_grads()
    if peft_config is not None:
        model = get_peft_model(model, resolve_targets(model, peft_config))  # pyright: ignore[reportAssignmentType]
        train_copies_in_float32(model)
    if args.bf16 and getattr(model, "is_loaded_in_4bit", False):
        peft_module_casting_to_bf16(model)
    return model


def train_copies_in_float32(model: torch.nn.Module) -> bool:
    """Hold modules that an adapter trains whole (`modules_to_save`) in float32, in place, as PEFT its matrices.

    Their inputs are cast, and their outputs have the base's dtype as before. Returns whether there were any in 16 bits.
    """
    from peft.utils import ModulesToSaveWrapper

    changed = False
    for wrapper in [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]:
        for part in wrapper.modules_to_save.values():
            first = next(part.parameters())
            if first.requires_grad and first.dtype in (torch.float16, torch.bfloat16):
                part.register_forward_hook(partial(_cast_output, first.dtype))
                part.float().register_forward_pre_hook(_cast_inputs)
                changed = True
    return changed


def _cast_inputs(module: torch.nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
    wide = next(module.parameters()).dtype
    return tuple(x.to(wide) if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs)


def _cast_output(dtype: torch.dtype, module: torch.nn.Module, inputs: object, output: object) -> object:
    return output.to(dtype) if isinstance(output, torch.Tensor) else output


def merged_base(model: "PeftModel") -> PreTrainedModel:
    """Merge a `PeftModel`'s active adapter into its base, in the base's dtype and in place; return the base.

    Raises `ValueError` for an adapter that cannot be merged (prompt tuning, GPTQ and other quantised layers).
    """
    from peft.utils import ModulesToSaveWrapper

    if not hasattr(model.base_model, "merge_and_unload"):
        kind = model.active_peft_config.peft_type
        raise ValueError(f"adapters of type {getattr(kind, 'value', kind)} cannot be merged into the base")
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):  # they replace the base's, and may be in float32
            for name in module.active_adapters:
                module.modules_to_save[name].to(next(module.original_module.parameters()).dtype)
    try:
        return model.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError) as error:  # RuntimeError: layers without a merge
        raise ValueError(f"peft cannot merge that adapter into the base ({error!r})") from error


def merge_adapter(model: "PeftModel") -> PreTrainedModel:
    """`merged_base` of a `PeftModel` that gets a new adapter, with a warning. Raises `ValueError` as that does."""
    active, others = list(model.active_adapters), sorted(set(model.peft_config) - set(model.active_adapters))
    conflict = f"peft_config was given with a PeftModel (adapter {', '.join(active)})"
    try:
        base = merged_base(model)
    except ValueError as error:
        raise ValueError(f"{conflict}, and {error}. Leave it out, or pass the unquantised base.") from error
    logger.warning(
        "%s: the adapter is merged into the base%s, and a new one is trained on top. The new adapter belongs to the "
        "merged base, which is not saved with it: save trainer.model.merge_and_unload() to use the result.%s",
        conflict,
        ", whose quantised weights are rounded again" if is_quantized(base) else "",
        f" Adapters that were not active are dropped: {', '.join(others)}." if others else "",
    )
    return base


def prepare_model_for_kbit_training(
    model: PreTrainedModel,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict[str, object] | str | None = None,
) -> PreTrainedModel:
    """Freeze every weight of a quantised model, hold its 16-bit ones (norms, embeddings, head) in float32, return it.

    Gradient checkpointing is switched on with what frozen weights need, unless `use_gradient_checkpointing` is false.
    """
    from peft import prepare_model_for_kbit_training as prepare

    model = prepare(model, use_gradient_checkpointing=False)
    if use_gradient_checkpointing:
        enable_gradient_checkpointing(model, gradient_checkpointing_kwargs)
    return model


def peft_module_casting_to_bf16(model: torch.nn.Module) -> None:
    """Hold a k-bit model's adapters, and its unquantised embeddings and head, in bfloat16; norms in float32.

    In place. Norms stay precise because their statistics do not survive eight bits of mantissa.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            base = {id(parameter) for parameter in module.get_base_layer().parameters()}  # pyright: ignore[reportCallIssue]
            for parameter in module.parameters():  # pyright: ignore[reportAttributeAccessIssue]
                if id(parameter) not in base and parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
        elif isinstance(module, torch.nn.LayerNorm) or "norm" in name.rpartition(".")[2]:
            module.to(torch.float32)
        elif isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            is_plain = type(module.weight) is torch.nn.Parameter and module.weight.dtype == torch.float32
            if is_plain and any(part in name for part in _EMBEDDINGS_AND_HEADS):
                module.to(torch.bfloat16)


def resolve_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    """The torch dtype that a config's string names; `"auto"` (also for `None`) keeps the checkpoint's own."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return "auto" if dtype is None else dtype
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    if isinstance(named, torch.dtype) and named.is_floating_point:
        return named
    raise ValueError(f"dtype must be 'auto', a floating torch.dtype or its name, got {dtype!r}.")


def get_quantization_config(model_args: Any) -> "BitsAndBytesConfig | None":
    """The bitsandbytes config that `load_in_4bit` or `load_in_8bit` asks for, `None` if neither does.

    4-bit products are computed in `model_args.dtype` (bfloat16 where it is not given, the recommendation of QLoRA,
    arXiv:2305.14314); `bnb_4bit_quant_storage` defaults to that dtype too, so that FSDP can shard the weights.
    """
    if model_args.load_in_4bit and model_args.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit cannot be combined; set one.")
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    if find_spec("bitsandbytes") is None:
        raise ImportError("load_in_4bit and load_in_8bit need bitsandbytes. Run `pip install 'trl[quantization]'`.")
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    named = resolve_dtype(model_args.dtype)
    compute_dtype = named if isinstance(named, torch.dtype) else torch.bfloat16
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage or compute_dtype,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """The device map that puts a quantised model on this process's accelerator; `None` on a CPU-only machine."""
    if torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        return {"": PartialState().local_process_index}
    return None


def is_quantized(model: torch.nn.Module) -> bool:
    """Whether the model's base weights are held in fewer than 16 bits (bitsandbytes, GPTQ, AWQ, HQQ, …)."""
    flags = ("is_loaded_in_8bit", "is_loaded_in_4bit", "is_quantized")
    return any(getattr(model, flag, False) for flag in flags)


def forbid_inference_packing(model: torch.nn.Module) -> None:
    """Keep bitsandbytes' 4-bit layers in the layout that has a backward, in place.

    bitsandbytes 0.50 on a CPU with AVX512-BF16 repacks weights at the first forward in eval mode, after which there are
    no gradients. Remove once `matmul_4bit` gives gradients for packed weights.
    """
    attribute = "support_avx512bf16_for_cpu"
    for module in model.modules():
        if getattr(module, attribute, False):
            setattr(module, attribute, False)
