"""Loading, PEFT, quantisation, value heads, attention over segments, the scoring forward, offloading. Public names are lazy."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "clone_chat_template": "trl.models.chat_setup",
    "setup_chat_format": "trl.models.chat_setup",
    "get_act_offloading_ctx_manager": "trl.models.activation_offloading",
    "prepare_deepspeed": "trl.models.distributed",
    "prepare_fsdp": "trl.models.distributed",
    "unwrap_model_for_generation": "trl.models.distributed",
    "prepare_model_for_kbit_training": "trl.models.peft",
    "prepare_peft_model": "trl.models.peft",
    "AutoModelForCausalLMWithValueHead": "trl.models.value_head",
    "AutoModelForSeq2SeqLMWithValueHead": "trl.models.value_head",
    "PreTrainedModelWrapper": "trl.models.value_wrapper",
    "create_reference_model": "trl.models.reference_copies",
    "GeometricMixtureWrapper": "trl.models.geometric_mixture",
}

if TYPE_CHECKING:
    from trl.models.activation_offloading import (
        get_act_offloading_ctx_manager as get_act_offloading_ctx_manager,
    )
    from trl.models.chat_setup import clone_chat_template as clone_chat_template
    from trl.models.chat_setup import setup_chat_format as setup_chat_format
    from trl.models.distributed import prepare_deepspeed as prepare_deepspeed
    from trl.models.distributed import prepare_fsdp as prepare_fsdp
    from trl.models.distributed import unwrap_model_for_generation as unwrap_model_for_generation
    from trl.models.geometric_mixture import GeometricMixtureWrapper as GeometricMixtureWrapper
    from trl.models.peft import prepare_model_for_kbit_training as prepare_model_for_kbit_training
    from trl.models.peft import prepare_peft_model as prepare_peft_model
    from trl.models.reference_copies import create_reference_model as create_reference_model
    from trl.models.value_head import (
        AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead,
    )
    from trl.models.value_head import (
        AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead,
    )
    from trl.models.value_wrapper import PreTrainedModelWrapper as PreTrainedModelWrapper

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
