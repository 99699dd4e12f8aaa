"""Known import path of many small things; each lives in the module named below. Nothing is defined here."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "DataCollatorForChatML": "trl.collators.chatml",
    "DataCollatorForCompletionOnlyLM": "trl.collators.completion_only",
    "ConstantLengthDataset": "trl.data.constant_length",
    "remove_none_values": "trl.data.formats",
    "disable_dropout_in_model": "trl.models.dropout",
    "create_model_from_path": "trl.models.loading",
    "get_config_model_id": "trl.models.loading",
    "get_peft_config": "trl.models.peft",
    "peft_module_casting_to_bf16": "trl.models.peft",
    "get_kbit_device_map": "trl.models.quantization",
    "get_quantization_config": "trl.models.quantization",
    "generate_model_card": "trl.reporting.model_card",
    "print_prompt_completions_sample": "trl.reporting.tables",
    "print_rich_table": "trl.reporting.tables",
    "get_comet_experiment_url": "trl.reporting.trackers",
    "log_table_to_comet_experiment": "trl.reporting.trackers",
    "split_pixel_values_by_grid": "trl.tensors.images",
    "unsplit_pixel_values_by_grid": "trl.tensors.images",
    "first_true_indices": "trl.tensors.masking",
    "truncate_response": "trl.tensors.masking",
    "truncate_right": "trl.tensors.masking",
    "exact_div": "trl.tensors.padding",
    "flush_left": "trl.tensors.padding",
    "flush_right": "trl.tensors.padding",
    "pad": "trl.tensors.padding",
    "pad_to_length": "trl.tensors.padding",
    "shuffle_sequence_dict": "trl.tensors.padding",
    "split_tensor_dict": "trl.tensors.padding",
    "cap_exp": "trl.tensors.statistics",
    "entropy_from_logits": "trl.tensors.statistics",
    "get_exp_cap": "trl.tensors.statistics",
    "identity": "trl.tensors.statistics",
    "nanmax": "trl.tensors.statistics",
    "nanmin": "trl.tensors.statistics",
    "nanstd": "trl.tensors.statistics",
    "selective_log_softmax": "trl.tensors.statistics",
    "DPODataCollatorWithPadding": "trl.collators.preference",
    "RewardDataCollatorWithPadding": "trl.collators.reward",
    "compute_accuracy": "trl.reporting.accuracy",
    "RunningMoments": "trl.tensors.moments",
    "get_global_statistics": "trl.tensors.moments",
    "empty_cache": "trl.models.device_cache",
    "AdaptiveKLController": "trl.objectives.kl",
    "FixedKLController": "trl.objectives.kl",
    "RepeatSampler": "trl.rollouts.repeat_sampler",
    "OnPolicyConfig": "trl.trainer.on_policy_config",
    "OnlineTrainerState": "trl.trainer.online_state",
    "add_bos_token_if_needed": "trl.data.special_tokens",
    "add_eos_token_if_needed": "trl.data.special_tokens",
    "batch_generation": "trl.generation.padded_queries",
    "generate": "trl.generation.padded_queries",
    "forward": "trl.models.padded_queries",
    "get_reward": "trl.models.padded_queries",
    "ensure_master_addr_port": "trl.models.rendezvous",
    "prepare_deepspeed": "trl.models.frozen_deepspeed",
}

if TYPE_CHECKING:
    from trl.collators.chatml import DataCollatorForChatML as DataCollatorForChatML
    from trl.collators.completion_only import (
        DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM,
    )
    from trl.collators.preference import DPODataCollatorWithPadding as DPODataCollatorWithPadding
    from trl.collators.reward import RewardDataCollatorWithPadding as RewardDataCollatorWithPadding
    from trl.data.constant_length import ConstantLengthDataset as ConstantLengthDataset
    from trl.data.formats import remove_none_values as remove_none_values
    from trl.data.special_tokens import add_bos_token_if_needed as add_bos_token_if_needed
    from trl.data.special_tokens import add_eos_token_if_needed as add_eos_token_if_needed
    from trl.generation.padded_queries import batch_generation as batch_generation
    from trl.generation.padded_queries import generate as generate
    from trl.models.device_cache import empty_cache as empty_cache
    from trl.models.dropout import disable_dropout_in_model as disable_dropout_in_model
    from trl.models.frozen_deepspeed import prepare_deepspeed as prepare_deepspeed
    from trl.models.loading import create_model_from_path as create_model_from_path
    from trl.models.loading import get_config_model_id as get_config_model_id
    from trl.models.padded_queries import forward as forward
    from trl.models.padded_queries import get_reward as get_reward
    from trl.models.peft import get_peft_config as get_peft_config
    from trl.models.peft import peft_module_casting_to_bf16 as peft_module_casting_to_bf16
    from trl.models.quantization import get_kbit_device_map as get_kbit_device_map
    from trl.models.quantization import get_quantization_config as get_quantization_config
    from trl.models.rendezvous import ensure_master_addr_port as ensure_master_addr_port
    from trl.objectives.kl import AdaptiveKLController as AdaptiveKLController
    from trl.objectives.kl import FixedKLController as FixedKLController
    from trl.reporting.accuracy import compute_accuracy as compute_accuracy
    from trl.reporting.model_card import generate_model_card as generate_model_card
    from trl.reporting.tables import print_prompt_completions_sample as print_prompt_completions_sample
    from trl.reporting.tables import print_rich_table as print_rich_table
    from trl.reporting.trackers import get_comet_experiment_url as get_comet_experiment_url
    from trl.reporting.trackers import log_table_to_comet_experiment as log_table_to_comet_experiment
    from trl.rollouts.repeat_sampler import RepeatSampler as RepeatSampler
    from trl.tensors.images import split_pixel_values_by_grid as split_pixel_values_by_grid
    from trl.tensors.images import unsplit_pixel_values_by_grid as unsplit_pixel_values_by_grid
    from trl.tensors.masking import first_true_indices as first_true_indices
    from trl.tensors.masking import truncate_response as truncate_response
    from trl.tensors.masking import truncate_right as truncate_right
    from trl.tensors.moments import RunningMoments as RunningMoments
    from trl.tensors.moments import get_global_statistics as get_global_statistics
    from trl.tensors.padding import exact_div as exact_div
    from trl.tensors.padding import flush_left as flush_left
    from trl.tensors.padding import flush_right as flush_right
    from trl.tensors.padding import pad as pad
    from trl.tensors.padding import pad_to_length as pad_to_length
    from trl.tensors.padding import shuffle_sequence_dict as shuffle_sequence_dict
    from trl.tensors.padding import split_tensor_dict as split_tensor_dict
    from trl.tensors.statistics import cap_exp as cap_exp
    from trl.tensors.statistics import entropy_from_logits as entropy_from_logits
    from trl.tensors.statistics import get_exp_cap as get_exp_cap
    from trl.tensors.statistics import identity as identity
    from trl.tensors.statistics import nanmax as nanmax
    from trl.tensors.statistics import nanmin as nanmin
    from trl.tensors.statistics import nanstd as nanstd
    from trl.tensors.statistics import selective_log_softmax as selective_log_softmax
    from trl.trainer.on_policy_config import OnPolicyConfig as OnPolicyConfig
    from trl.trainer.online_state import OnlineTrainerState as OnlineTrainerState

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
