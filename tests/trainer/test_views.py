"""Attributes that the trainers of 0.26 set: each is there with its value, and setting one does something or is refused."""

import tempfile

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

import trl
from tests.tiny import tiny_model
from tests.trainer import cpo_runs, dpo_runs, grpo_runs, kto_runs, reward_runs
from tests.trainer.one_step import (
    SETTINGS,
    assert_same_gradient,
    fixed_rows,
    step,
    trainer_of,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

_PAIRS = (
    "aux_loss_coef aux_loss_enabled beta generate_during_eval is_encoder_decoder label_pad_token_id max_completion_length "
    "max_length max_prompt_length truncation_mode "
)
_REFERENCE = "is_peft_model model_adapter_name precompute_ref_log_probs ref_adapter_name ref_model "
_GROUPS = (
    "beta chat_template_kwargs eos_token_id epsilon_high epsilon_low generation_config generation_kwargs guided_decoding_regex "
    "log_completions log_unique_prompts mask_truncated_completions max_completion_length min_p num_completions_to_print "
    "num_generations num_generations_eval num_iterations pad_token pad_token_id ref_model repetition_penalty "
    "reward_func_names reward_funcs reward_processing_classes reward_weights shuffle_dataset temperature top_k top_p "
    "use_transformers_paged use_vllm vllm_gpu_memory_utilization vllm_mode vllm_tensor_parallel_size "
)
# Those of methods_0.26.2.json that have a meaning here; docs/reference/deviations.md lists the others.
RECORDED = {
    "DPOTrainer": _PAIRS + _REFERENCE + "dataset_num_proc f_divergence_params f_divergence_type is_vision_model label_smoothing "
    "loss_type loss_weights pad_token_id padding_free reference_free use_logits_to_keep use_weighting",
    "KTOTrainer": _PAIRS + _REFERENCE + "calculate_KL desirable_weight loss_type padding_value undesirable_weight",
    "BCOTrainer": _PAIRS + _REFERENCE + "clf embedding_func embedding_tokenizer match_underlying_distribution padding_value",
    "CPOTrainer": _PAIRS + "alpha cpo_alpha decoder_start_token_id label_smoothing loss_type pad_token_id padding_value simpo_gamma",
    "ORPOTrainer": _PAIRS + "decoder_start_token_id pad_token_id padding_value",
    "GRPOTrainer": _GROUPS + "chat_template importance_sampling_level loss_type rollout_func scale_rewards tools "
    "top_entropy_quantile use_liger_kernel vllm_importance_sampling_cap vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode",
    "RLOOTrainer": _GROUPS + "max_prompt_length normalize_advantages reward_clip_range",
    "SFTTrainer": "aux_loss_enabled completion_only_loss maybe_activation_offload_context num_virtual_tokens padding_free",
    "RewardTrainer": "aux_loss_enabled maybe_activation_offload_context",
}  # fmt: skip
MAKERS = {
    "DPOTrainer": lambda: dpo_runs.make(beta=0.3, f_alpha_divergence_coef=0.7),
    "KTOTrainer": lambda: kto_runs.make(desirable_weight=1.5),
    "BCOTrainer": lambda: kto_runs.make_bco(**kto_runs.MATCHED),
    "CPOTrainer": lambda: cpo_runs.make(simpo_gamma=0.7, loss_type="simpo"),
    "ORPOTrainer": lambda: cpo_runs.make_orpo(beta=0.4),
    "GRPOTrainer": lambda: grpo_runs.make("grpo", epsilon=0.3, reward_weights=[2.0], temperature=0.9)[0],
    "RLOOTrainer": lambda: grpo_runs.make("rloo", reward_clip_range=[-1.0, 1.0])[0],
    "SFTTrainer": lambda: trainer_of(
        SFTTrainer, SFTConfig, None, {"completion_only_loss": False}, model=tiny_model("gpt2"),
        train_dataset=Dataset.from_list(fixed_rows()),
    ),
    "RewardTrainer": reward_runs.make,
}  # fmt: skip
VALUES = {
    "DPOTrainer": {
        "beta": 0.3, "f_divergence_params": {"alpha_divergence_coef": 0.7}, "loss_type": ["sigmoid"], "is_peft_model": False,
        "is_vision_model": False, "label_pad_token_id": -100, "pad_token_id": 0, "aux_loss_coef": 0.0,
    },
    "KTOTrainer": {"calculate_KL": True, "desirable_weight": 1.5, "is_encoder_decoder": False, "ref_adapter_name": None},
    "BCOTrainer": {"embedding_func": kto_runs.embed, "match_underlying_distribution": True, "beta": 0.3},
    "CPOTrainer": {"simpo_gamma": 0.7, "loss_type": "simpo", "decoder_start_token_id": None},
    "ORPOTrainer": {"beta": 0.4, "aux_loss_enabled": False},
    "GRPOTrainer": {
        "beta": 0.1, "epsilon_low": 0.3, "epsilon_high": 0.3, "num_generations": 4, "num_generations_eval": 4, "tools": None,
        "reward_func_names": ["even_tokens"], "reward_funcs": [grpo_runs.even_tokens], "reward_processing_classes": [None],
        "rollout_func": None, "temperature": 0.9, "pad_token_id": 0, "use_vllm": False,
    },
    "RLOOTrainer": {"reward_clip_range": [-1.0, 1.0], "max_prompt_length": 512, "shuffle_dataset": True},
    "SFTTrainer": {"num_virtual_tokens": 0, "padding_free": False, "completion_only_loss": False},
    "RewardTrainer": {"aux_loss_enabled": False},
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_attributes(name):
    trainer = MAKERS[name]()
    missing = [each for each in RECORDED[name].split() if not hasattr(trainer, each)]
    assert not missing
    assert {each: getattr(trainer, each) for each in VALUES[name]} == VALUES[name]
    assert not hasattr(trainer, "no_such_attribute") and not hasattr(trainer, "per_device_train_batch_size")
    if name == "GRPOTrainer":
        assert trainer.reward_weights.tolist() == [2.0]
        assert (trainer.generation_config.temperature, trainer.generation_config.max_new_tokens) == (0.9, 7)
    if name in ("DPOTrainer", "KTOTrainer", "BCOTrainer"):
        assert isinstance(trainer.ref_model, torch.nn.Module)


def test_setting_a_field_that_is_read_in_every_step():
    trainer = dpo_runs.make(beta=0.1)
    trainer.beta = 0.3
    assert trainer.args.beta == trainer.beta == 0.3
    assert_same_gradient(step(trainer)[0], step(dpo_runs.make(beta=0.3))[0])
    group, _ = grpo_runs.make("grpo")
    group.epsilon_low = 0.05
    assert group.epsilon_low == group.args.epsilon == 0.05


@pytest.mark.parametrize(("attribute", "value"), [("max_length", 5), ("ref_model", None)])
def test_setting_what_was_read_before(attribute, value):
    trainer = dpo_runs.make()
    setattr(trainer, attribute, getattr(trainer, attribute))
    with pytest.raises(AttributeError, match=f"{attribute} of DPOTrainer cannot be set after.*DPOConfig"):
        setattr(trainer, attribute, value)
    trainer.mine = 3
    assert trainer.mine == 3


def test_a_penalty_without_its_reference_is_refused_before_the_first_step():
    trainer, _ = grpo_runs.make("grpo", beta=0.0)
    trainer.beta = 0.1
    with pytest.raises(ValueError, match=r"beta=0\.1 needs a reference policy"):
        trainer.train()


def test_setting_before_the_constructor():
    class Mine(DPOTrainer):
        def __init__(self, *args, **kwargs):
            self.beta, self.is_peft_model, self.max_length = 0.7, True, 1024
            super().__init__(*args, **kwargs)
            self.seen = self.beta, self.is_peft_model

    rows = Dataset.from_list(dpo_runs.pairs())
    trainer = trainer_of(Mine, DPOConfig, None, {}, model=tiny_model("gpt2"), train_dataset=rows)
    assert trainer.seen == (0.1, False)


# ---- a trainer that skips our constructor


@pytest.mark.parametrize("name", [*MAKERS, "GKDTrainer"])
def test_a_trainer_that_skips_our_constructor_is_refused(name):
    """Attributes that it sets are those of any object."""
    base = getattr(trl, name)

    class Mine(base):
        def __init__(self, model, args):
            self.beta, self.loss_type = 0.3, "simpo"
            Trainer.__init__(self, model=model, args=args)

    with pytest.raises(TypeError, match=r"Mine.__init__ did not call the constructor.*super\(\).__init__"):
        Mine(tiny_model("gpt2"), TrainingArguments(tempfile.mkdtemp(), **SETTINGS))
