"""One trainer and one config per method, over three bases."""

from typing import TYPE_CHECKING

from trl._lazy import attach

_NAMES = {
    "BEMACallback": "trl.trainer.callbacks",
    "LogCompletionsCallback": "trl.trainer.callbacks",
    "RichProgressCallback": "trl.trainer.callbacks",
    "SyncRefModelCallback": "trl.trainer.callbacks",
    "WeaveCallback": "trl.trainer.callbacks",
    "BaseTrainer": "trl.trainer.base_trainer",
    "SFTConfig": "trl.trainer.sft_config",
    "SFTTrainer": "trl.trainer.sft_trainer",
    "ModelConfig": "trl.options.model",
    "ConstantLengthDataset": "trl.data.constant_length",
    "DataCollatorForCompletionOnlyLM": "trl.collators.completion_only",
    "get_peft_config": "trl.models.peft",
    "get_kbit_device_map": "trl.models.quantization",
    "get_quantization_config": "trl.models.quantization",
    "disable_dropout_in_model": "trl.models.dropout",
    "DPOConfig": "trl.trainer.dpo_config",
    "DPOTrainer": "trl.trainer.dpo_trainer",
    "FDivergenceType": "trl.trainer.dpo_config",
    "FDivergenceConstants": "trl.trainer.dpo_config",
    "CPOConfig": "trl.trainer.cpo_config",
    "CPOTrainer": "trl.trainer.cpo_trainer",
    "ORPOConfig": "trl.trainer.orpo_config",
    "ORPOTrainer": "trl.trainer.orpo_trainer",
    "KTOConfig": "trl.trainer.kto_config",
    "KTOTrainer": "trl.trainer.kto_trainer",
    "BCOConfig": "trl.trainer.bco_config",
    "BCOTrainer": "trl.trainer.bco_trainer",
    "RewardConfig": "trl.trainer.reward_config",
    "RewardTrainer": "trl.trainer.reward_trainer",
    "PRMConfig": "trl.trainer.prm_config",
    "PRMTrainer": "trl.trainer.prm_trainer",
    "PreferenceTrainer": "trl.trainer.preference_trainer",
    "AdaptiveKLController": "trl.objectives.kl",
    "FixedKLController": "trl.objectives.kl",
    "PPOConfig": "trl.trainer.ppo_config",
    "PPOTrainer": "trl.trainer.ppo_trainer",
    "IterativeSFTConfig": "trl.trainer.iterative_sft_config",
    "IterativeSFTTrainer": "trl.trainer.iterative_sft_trainer",
    "GRPOConfig": "trl.trainer.grpo_config",
    "GRPOTrainer": "trl.trainer.grpo_trainer",
    "RLOOConfig": "trl.trainer.rloo_config",
    "RLOOTrainer": "trl.trainer.rloo_trainer",
}

if TYPE_CHECKING:
    from trl.collators.completion_only import (
        DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM,
    )
    from trl.data.constant_length import ConstantLengthDataset as ConstantLengthDataset
    from trl.models.dropout import disable_dropout_in_model as disable_dropout_in_model
    from trl.models.peft import get_peft_config as get_peft_config
    from trl.models.quantization import get_kbit_device_map as get_kbit_device_map
    from trl.models.quantization import get_quantization_config as get_quantization_config
    from trl.objectives.kl import AdaptiveKLController as AdaptiveKLController
    from trl.objectives.kl import FixedKLController as FixedKLController
    from trl.options.model import ModelConfig as ModelConfig
    from trl.trainer.base_trainer import BaseTrainer as BaseTrainer
    from trl.trainer.bco_config import BCOConfig as BCOConfig
    from trl.trainer.bco_trainer import BCOTrainer as BCOTrainer
    from trl.trainer.callbacks import BEMACallback as BEMACallback
    from trl.trainer.callbacks import LogCompletionsCallback as LogCompletionsCallback
    from trl.trainer.callbacks import RichProgressCallback as RichProgressCallback
    from trl.trainer.callbacks import SyncRefModelCallback as SyncRefModelCallback
    from trl.trainer.callbacks import WeaveCallback as WeaveCallback
    from trl.trainer.cpo_config import CPOConfig as CPOConfig
    from trl.trainer.cpo_trainer import CPOTrainer as CPOTrainer
    from trl.trainer.dpo_config import DPOConfig as DPOConfig
    from trl.trainer.dpo_config import FDivergenceConstants as FDivergenceConstants
    from trl.trainer.dpo_config import FDivergenceType as FDivergenceType
    from trl.trainer.dpo_trainer import DPOTrainer as DPOTrainer
    from trl.trainer.grpo_config import GRPOConfig as GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer as GRPOTrainer
    from trl.trainer.iterative_sft_config import IterativeSFTConfig as IterativeSFTConfig
    from trl.trainer.iterative_sft_trainer import IterativeSFTTrainer as IterativeSFTTrainer
    from trl.trainer.kto_config import KTOConfig as KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer as KTOTrainer
    from trl.trainer.orpo_config import ORPOConfig as ORPOConfig
    from trl.trainer.orpo_trainer import ORPOTrainer as ORPOTrainer
    from trl.trainer.ppo_config import PPOConfig as PPOConfig
    from trl.trainer.ppo_trainer import PPOTrainer as PPOTrainer
    from trl.trainer.preference_trainer import PreferenceTrainer as PreferenceTrainer
    from trl.trainer.prm_config import PRMConfig as PRMConfig
    from trl.trainer.prm_trainer import PRMTrainer as PRMTrainer
    from trl.trainer.reward_config import RewardConfig as RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer as RewardTrainer
    from trl.trainer.rloo_config import RLOOConfig as RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer as RLOOTrainer
    from trl.trainer.sft_config import SFTConfig as SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer as SFTTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
