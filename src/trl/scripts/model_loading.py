"""From `ModelConfig` to the keyword arguments with which a trainer loads the model."""

from typing import Any

from trl.models.quantization import get_kbit_device_map, get_quantization_config
from trl.options.model import ModelConfig


def model_init_kwargs(
    model_args: ModelConfig, explicit: dict[str, Any] | str | None = None
) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained`; those of `explicit` (the config's own) win.

    A quantised model is placed on this process's device while it loads.
    """
    named = {
        "revision": model_args.model_revision,
        "trust_remote_code": model_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    arguments = {name: value for name, value in named.items() if value is not None}
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        arguments["quantization_config"] = quantization
        arguments["device_map"] = get_kbit_device_map()
    if isinstance(explicit, dict):
        arguments.update(explicit)
    return arguments
