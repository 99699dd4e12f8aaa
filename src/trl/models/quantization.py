"""The precision of loaded weights: torch dtypes by name, 4-bit and 8-bit loading through bitsandbytes."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig


def resolve_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    """The torch dtype that a config's string names; `"auto"` (also for `None`) keeps the checkpoint's own."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return "auto" if dtype is None else dtype
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    if isinstance(named, torch.dtype) and named.is_floating_point:
        return named
    raise ValueError(
        f"dtype must be 'auto', a torch.dtype or the name of a floating one, got {dtype!r}. "
        "Use for example 'float32', 'bfloat16' or 'float16'."
    )


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
        raise ImportError("4-bit and 8-bit loading need bitsandbytes: `pip install trl[quantization]`.")
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


def is_quantized(model: Any) -> bool:
    """Whether the model's base weights are held in fewer than 16 bits (bitsandbytes, GPTQ, AWQ, HQQ, …)."""
    flags = ("is_loaded_in_8bit", "is_loaded_in_4bit", "is_quantized")
    return any(getattr(model, flag, False) for flag in flags)


def forbid_inference_packing(model: torch.nn.Module) -> None:
    """Keep bitsandbytes' 4-bit layers in the layout that has a backward, in place.

    bitsandbytes 0.50 on a CPU with AVX512-BF16 repacks weights at the first forward in eval mode, after which there are no
    gradients. Remove once `matmul_4bit` gives gradients for packed weights.
    """
    attribute = "support_avx512bf16_for_cpu"
    for module in model.modules():
        if getattr(module, attribute, False):
            setattr(module, attribute, False)
