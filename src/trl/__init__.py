"""Post-train transformer language models. Public names are lazy: `import trl` loads no torch."""

from typing import TYPE_CHECKING

from trl._lazy import attach, install

__version__ = "0.26.2+exact.1"
"""The version of TRL whose interface this is, for programs that compare it, and behind the plus the number of this
library's own.
"""

# What `trl._names` has for `trl`, as type checkers and editors read it; a test compares the two.
if TYPE_CHECKING:
    from transformers.trainer_utils import set_seed as set_seed

    from trl.agents.text_environment import TextEnvironment as TextEnvironment
    from trl.agents.text_environment import TextHistory as TextHistory
    from trl.collators.completion_only import DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM
    from trl.data.arithmetic import make_data as make_data
    from trl.data.formats import extract_prompt as extract_prompt
    from trl.data.formats import is_conversational as is_conversational
    from trl.data.formats import is_conversational_from_value as is_conversational_from_value
    from trl.data.formats import maybe_convert_to_chatml as maybe_convert_to_chatml
    from trl.data.formats import maybe_extract_prompt as maybe_extract_prompt
    from trl.data.formats import maybe_unpair_preference_dataset as maybe_unpair_preference_dataset
    from trl.data.formats import prepare_multimodal_messages as prepare_multimodal_messages
    from trl.data.formats import prepare_multimodal_messages_vllm as prepare_multimodal_messages_vllm
    from trl.data.formats import unpair_preference_dataset as unpair_preference_dataset
    from trl.data.packing import pack_dataset as pack_dataset
    from trl.data.ragged import truncate_dataset as truncate_dataset
    from trl.data.sources import DatasetMixtureConfig as DatasetMixtureConfig
    from trl.data.sources import get_dataset as get_dataset
    from trl.data.templates import apply_chat_template as apply_chat_template
    from trl.data.templates import maybe_apply_chat_template as maybe_apply_chat_template
    from trl.experimental.ppo.ppo_config import PPOConfig as PPOv2Config  # noqa: F401
    from trl.experimental.ppo.ppo_trainer import PPOTrainer as PPOv2Trainer  # noqa: F401
    from trl.models.chat_setup import clone_chat_template as clone_chat_template
    from trl.models.chat_setup import setup_chat_format as setup_chat_format
    from trl.models.diffusion.ddim import DDPOSchedulerOutput as DDPOSchedulerOutput
    from trl.models.diffusion.stable_diffusion import DDPOPipelineOutput as DDPOPipelineOutput
    from trl.models.diffusion.stable_diffusion import DDPOStableDiffusionPipeline as DDPOStableDiffusionPipeline
    from trl.models.diffusion.stable_diffusion import (
        DefaultDDPOStableDiffusionPipeline as DefaultDDPOStableDiffusionPipeline,
    )
    from trl.models.peft import get_kbit_device_map as get_kbit_device_map
    from trl.models.peft import get_peft_config as get_peft_config
    from trl.models.peft import get_quantization_config as get_quantization_config
    from trl.models.reference_weights import create_reference_model as create_reference_model
    from trl.models.value_head import SUPPORTED_ARCHITECTURES as SUPPORTED_ARCHITECTURES
    from trl.models.value_head import AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead
    from trl.models.value_head import AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead
    from trl.models.value_wrapper import PreTrainedModelWrapper as PreTrainedModelWrapper
    from trl.options.model import ModelConfig as ModelConfig
    from trl.options.packages import is_diffusers_available as is_diffusers_available
    from trl.options.packages import is_liger_kernel_available as is_liger_kernel_available
    from trl.options.packages import is_llmblender_available as is_llmblender_available
    from trl.options.packages import is_peft_available as is_peft_available
    from trl.options.packages import is_wandb_available as is_wandb_available
    from trl.rewards.judges import AllTrueJudge as AllTrueJudge
    from trl.rewards.judges import BaseBinaryJudge as BaseBinaryJudge
    from trl.rewards.judges import BaseJudge as BaseJudge
    from trl.rewards.judges import BasePairwiseJudge as BasePairwiseJudge
    from trl.rewards.judges import BaseRankJudge as BaseRankJudge
    from trl.rewards.judges import HfPairwiseJudge as HfPairwiseJudge
    from trl.rewards.judges import OpenAIPairwiseJudge as OpenAIPairwiseJudge
    from trl.rewards.judges import PairRMJudge as PairRMJudge
    from trl.rewards.judges import RandomPairwiseJudge as RandomPairwiseJudge
    from trl.rewards.judges import RandomRankJudge as RandomRankJudge
    from trl.rollouts.best_of_n import BestOfNSampler as BestOfNSampler
    from trl.scripts.arguments import DPOScriptArguments as DPOScriptArguments
    from trl.scripts.arguments import ScriptArguments as ScriptArguments
    from trl.scripts.arguments import SFTScriptArguments as SFTScriptArguments
    from trl.scripts.parser import TrlParser as TrlParser
    from trl.scripts.plan import plan as plan
    from trl.scripts.running import init_zero_verbose as init_zero_verbose
    from trl.trainer.alignprop_config import AlignPropConfig as AlignPropConfig
    from trl.trainer.alignprop_trainer import AlignPropTrainer as AlignPropTrainer
    from trl.trainer.bco_config import BCOConfig as BCOConfig
    from trl.trainer.bco_trainer import BCOTrainer as BCOTrainer
    from trl.trainer.callbacks.bema import BEMACallback as BEMACallback
    from trl.trainer.callbacks.log_completions import LogCompletionsCallback as LogCompletionsCallback
    from trl.trainer.callbacks.merge_model import MergeModelCallback as MergeModelCallback
    from trl.trainer.callbacks.rich_progress import RichProgressCallback as RichProgressCallback
    from trl.trainer.callbacks.sync_ref_model import SyncRefModelCallback as SyncRefModelCallback
    from trl.trainer.callbacks.weave import WeaveCallback as WeaveCallback
    from trl.trainer.callbacks.win_rate import WinRateCallback as WinRateCallback
    from trl.trainer.cpo_config import CPOConfig as CPOConfig
    from trl.trainer.cpo_trainer import CPOTrainer as CPOTrainer
    from trl.trainer.ddpo_config import DDPOConfig as DDPOConfig
    from trl.trainer.ddpo_trainer import DDPOTrainer as DDPOTrainer
    from trl.trainer.distillation_config import DistillationConfig as DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer as DistillationTrainer
    from trl.trainer.dpo_config import DPOConfig as DPOConfig
    from trl.trainer.dpo_config import FDivergenceConstants as FDivergenceConstants
    from trl.trainer.dpo_config import FDivergenceType as FDivergenceType
    from trl.trainer.dpo_trainer import DPOTrainer as DPOTrainer
    from trl.trainer.gkd_config import GKDConfig as GKDConfig
    from trl.trainer.gkd_trainer import GKDTrainer as GKDTrainer
    from trl.trainer.grpo_config import GRPOConfig as GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer as GRPOTrainer
    from trl.trainer.iterative_sft_config import IterativeSFTConfig as IterativeSFTConfig
    from trl.trainer.iterative_sft_trainer import IterativeSFTTrainer as IterativeSFTTrainer
    from trl.trainer.kto_config import KTOConfig as KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer as KTOTrainer
    from trl.trainer.nash_md_config import NashMDConfig as NashMDConfig
    from trl.trainer.nash_md_trainer import NashMDTrainer as NashMDTrainer
    from trl.trainer.online_dpo_config import OnlineDPOConfig as OnlineDPOConfig
    from trl.trainer.online_dpo_trainer import OnlineDPOTrainer as OnlineDPOTrainer
    from trl.trainer.orpo_config import ORPOConfig as ORPOConfig
    from trl.trainer.orpo_trainer import ORPOTrainer as ORPOTrainer
    from trl.trainer.ppo_config import PPOConfig as PPOConfig
    from trl.trainer.ppo_trainer import PPOTrainer as PPOTrainer
    from trl.trainer.prm_config import PRMConfig as PRMConfig
    from trl.trainer.prm_trainer import PRMTrainer as PRMTrainer
    from trl.trainer.reward_config import RewardConfig as RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer as RewardTrainer
    from trl.trainer.rloo_config import RLOOConfig as RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer as RLOOTrainer
    from trl.trainer.sft_config import SFTConfig as SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer as SFTTrainer
    from trl.trainer.xpo_config import XPOConfig as XPOConfig
    from trl.trainer.xpo_trainer import XPOTrainer as XPOTrainer

install()
__getattr__, __dir__, __all__ = attach(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
