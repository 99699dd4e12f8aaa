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
    from trl.options.model import ModelConfig as ModelConfig
    from trl.trainer.base_trainer import BaseTrainer as BaseTrainer
    from trl.trainer.callbacks import BEMACallback as BEMACallback
    from trl.trainer.callbacks import LogCompletionsCallback as LogCompletionsCallback
    from trl.trainer.callbacks import RichProgressCallback as RichProgressCallback
    from trl.trainer.callbacks import SyncRefModelCallback as SyncRefModelCallback
    from trl.trainer.callbacks import WeaveCallback as WeaveCallback
    from trl.trainer.dpo_config import DPOConfig as DPOConfig
    from trl.trainer.dpo_config import FDivergenceConstants as FDivergenceConstants
    from trl.trainer.dpo_config import FDivergenceType as FDivergenceType
    from trl.trainer.dpo_trainer import DPOTrainer as DPOTrainer
    from trl.trainer.sft_config import SFTConfig as SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer as SFTTrainer

__getattr__, __dir__, __all__ = attach(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
