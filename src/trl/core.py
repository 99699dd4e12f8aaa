"""Import path of older programs; nothing is defined here."""

from transformers.trainer_utils import set_seed as set_seed

from trl.generation.length_sampler import LengthSampler as LengthSampler
from trl.models.device_cache import PPODecorators as PPODecorators
from trl.reporting.step_statistics import WANDB_PADDING as WANDB_PADDING
from trl.reporting.step_statistics import flatten_dict as flatten_dict
from trl.reporting.step_statistics import stack_dicts as stack_dicts
from trl.reporting.step_statistics import stats_to_np as stats_to_np
from trl.tensors.statistics import clip_by_value as clip_by_value
from trl.tensors.statistics import entropy_from_logits as entropy_from_logits
from trl.tensors.statistics import logprobs_from_logits as logprobs_from_logits
from trl.tensors.statistics import masked_mean as masked_mean
from trl.tensors.statistics import masked_var as masked_var
from trl.tensors.statistics import masked_whiten as masked_whiten
from trl.tensors.statistics import whiten as whiten
