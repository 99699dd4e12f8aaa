"""The names known at this import path; the code lives in the modules named below."""

from trl.models.chat_setup import ChatMlSpecialTokens, clone_chat_template, setup_chat_format
from trl.models.checkpointing import disable_gradient_checkpointing, enable_gradient_checkpointing
from trl.models.distributed import (
    add_hooks,
    get_all_parameters,
    iter_params,
    prepare_deepspeed,
    prepare_fsdp,
    remove_hooks,
    unwrap_model_for_generation,
)
from trl.models.peft import (
    peft_module_casting_to_bf16,
    prepare_model_for_kbit_training,
    prepare_peft_model,
)

__all__ = [
    "ChatMlSpecialTokens",
    "add_hooks",
    "clone_chat_template",
    "disable_gradient_checkpointing",
    "enable_gradient_checkpointing",
    "get_all_parameters",
    "iter_params",
    "peft_module_casting_to_bf16",
    "prepare_deepspeed",
    "prepare_fsdp",
    "prepare_model_for_kbit_training",
    "prepare_peft_model",
    "remove_hooks",
    "setup_chat_format",
    "unwrap_model_for_generation",
]
