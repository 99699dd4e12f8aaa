"""Import path of older programs; the functions live in `trl.tensors` and transformers."""

from transformers.trainer_utils import set_seed as set_seed

from trl.tensors.statistics import entropy_from_logits as entropy_from_logits
from trl.tensors.statistics import logprobs_from_logits as logprobs_from_logits
from trl.tensors.statistics import masked_mean as masked_mean
from trl.tensors.statistics import masked_var as masked_var
from trl.tensors.statistics import masked_whiten as masked_whiten
