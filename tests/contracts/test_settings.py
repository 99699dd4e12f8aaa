"""Every number and every choice of every config is checked, in an error that names the setting."""

import dataclasses
import importlib
import math
from typing import Any

import pytest
from transformers import TrainingArguments

from trl.options.checks import declaration, kinds

PATHS = {
    "trl": "SFT Reward DPO KTO GRPO RLOO GKD IterativeSFT OnlineDPO XPO NashMD PPO Distillation",
    "trl.experimental": "CPO ORPO BCO PRM PPO GOLD MiniLLM GFPO PAPO GRPOWithReplayBuffer SDFT",
}
OF_EXPERIMENTAL = {"GRPOWithReplayBuffer": "grpo_with_replay_buffer"}
INHERITED = {field.name for field in dataclasses.fields(TrainingArguments)}


def configs() -> dict[str, Any]:
    found = {}
    for path, names in PATHS.items():
        for name in names.split():
            module = path if path == "trl" else f"{path}.{OF_EXPERIMENTAL.get(name, name.lower())}"
            found[f"{module}.{name}"] = getattr(importlib.import_module(module), f"{name}Config")
    return found


def outside(bounds: str) -> float | None:
    """A number outside of `> 0`, `[0, 1)`, ..., which stands for nothing else as -1 may; None where there is none."""
    if bounds.startswith(">"):
        sign, low = bounds.split()
        return float(low) - 2 * (sign == ">=")
    low, high = (float(end) for end in bounds[1:-1].split(","))
    if math.isfinite(high):
        return high + 1
    return low - 2 * (bounds[0] == "[") if math.isfinite(low) else None


def wrong_values(config: Any) -> dict[str, Any]:
    """A value that is not allowed, for each of the library's numbers and choices."""
    found: dict[str, Any] = {}
    for name, kind in kinds(config).items():
        if name in INHERITED or name == "world_size" or declaration(kind.item).reason is not None:
            continue
        if kind.choices:
            found[name] = "no such value"
        elif kind.reader in (int, float) and not kind.is_list:
            number = outside(declaration(kind.item).bounds or ">= 0")
            if number is not None:
                found[name] = int(number) if kind.reader is int else number
    return found


@pytest.mark.parametrize("name", CONFIGS := configs())
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_settings_out_of_their_bounds_are_refused(name, tmp_path):
    config = CONFIGS[name]
    common = {"output_dir": str(tmp_path)} if issubclass(config, TrainingArguments) else {}
    wrong = wrong_values(config)
    assert len(wrong) > 3
    for setting, value in wrong.items():
        with pytest.raises(ValueError, match=setting):
            config(**common, **{setting: value})


OF_ARGPARSE = {
    "help",
    "choices",
    "nargs",
    "const",
    "metavar",
    "aliases",
}  # `aliases` is HfArgumentParser's own


@pytest.mark.parametrize("name", CONFIGS)
def test_metadata_of_fields_is_made_for_argparse(name):
    # Newer transformers pass all of it to `add_argument`, which refuses what it does not know.
    for field in dataclasses.fields(CONFIGS[name]):
        assert set(field.metadata) <= OF_ARGPARSE, field.name


NAN = float("nan")
JS = {"f_divergence_type": "js_divergence"}
COMBINED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "trl.SFT": [
        ({"max_length": "long"}, "max_length must be a whole number"),
        ({"packing": True, "max_length": None}, "packing=True needs max_length"),
        ({"eval_packing": True, "max_length": None}, "eval_packing=True needs max_length"),
        ({"model_init_kwargs": "{oops"}, "model_init_kwargs must be a JSON object"),
        ({"dataset_kwargs": "[1]"}, "dataset_kwargs must be a JSON object"),
        ({"max_seq_length": 64, "max_length": 32}, "disagree"),
    ],
    "trl.IterativeSFT": [
        ({"packing": True, "max_length": 8}, "packing must be False"),
        ({"logging_steps": 0.1, "max_steps": -1}, "logging_steps=0.1 is a share of max_steps"),
    ],
    "trl.DPO": [
        ({"loss_type": "kto_pair"}, "unknown loss_type 'kto_pair'; known are .*'sigmoid'"),
        ({"loss_type": []}, "loss_type must name at least 1 loss"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "loss_weights must be 2"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [NAN, 1.0]}, "loss_weights must be a finite number"),
        ({"beta": 0, "loss_type": "ipo"}, "beta must be > 0 for loss_type 'ipo'"),
        ({"beta": 0, "loss_type": "sppo_hard"}, "beta must be > 0 for loss_type 'sppo_hard'"),
        ({"beta": "much"}, "beta must be a number, got 'much'"),
        ({"beta": math.inf}, "beta must be a finite number >= 0"),
        ({"label_smoothing": NAN}, r"label_smoothing must be a finite number in \[0, 0\.5\)"),
        ({"f_alpha_divergence_coef": NAN}, "f_alpha_divergence_coef must be a finite"),
        ({"f_divergence_type": "kl"}, "f_divergence_type must be one of 'reverse_kl'.*got 'kl'"),
        ({**JS, "loss_type": "nca_pair"}, "'js_divergence' .*loss_type 'nca_pair'"),
        ({**JS, "loss_type": ["sigmoid", "apo_zero"]}, "'js_divergence' .*loss_type 'apo_zero'"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "changes the reference while training"),
        ({"sync_ref_model": True, "reference_free": True}, "has no reference that sync"),
        ({"label_pad_token_id": 0}, "label_pad_token_id"),
        ({"ref_model_init_kwargs": "{oops"}, "ref_model_init_kwargs must be a JSON object"),
    ],
    "trl.KTO": [({"undesirable_weight": NAN}, "undesirable_weight must be a finite number")],
    "trl.experimental.bco.BCO": [
        ({"min_density_ratio": 2.0, "max_density_ratio": 1.0}, "min_density_ratio must be <= max_density_ratio")
    ],
    "trl.experimental.cpo.CPO": [
        ({"beta": 0.0, "loss_type": "ipo"}, "beta must be > 0 for loss_type 'ipo', got 0"),
        ({"beta": 0.0, "cpo_alpha": 0.0}, "beta must be > 0 for loss_type 'sigmoid', got 0"),
        ({"label_pad_token_id": 0}, "label_pad_token_id"),
    ],
    "trl.GRPO": [
        ({"loss_type": "gspo"}, "unknown loss_type 'gspo'; known are 'bnpo', 'cispo', 'dapo', 'dr_grpo', 'grpo'"),
        ({"importance_sampling_level": "row"}, "unknown importance_sampling_level 'row'; known are 'sequence'"),
        ({"scale_rewards": "std"}, "unknown scale_rewards 'std'; known are 'batch', 'group', 'none'"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "divides by max_completion_length, got None"),
        ({"generation_kwargs": "top_k=3"}, "generation_kwargs must be a JSON object, got 'top_k=3'"),
        ({"num_generations": 1}, "num_generations must be a whole number >= 2, got 1.* judged against the others"),
    ],
    "trl.RLOO": [
        ({"num_generations": 0}, "num_generations must be a whole number >= 2, got 0"),
        *(({"reward_clip_range": each}, "must be a smallest and a larger largest reward")
          for each in ((1.0, -1.0), (1.0,), (0.5, 0.5), 5.0, ("a", "b"))),
    ],
    "trl.experimental.gfpo.GFPO": [
        ({"num_generations": 4, "num_remains_in_group": 4}, "must be less than num_generations=4"),
        ({"num_generations": 4, "num_remains_in_group": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
         "leaves 3 completions per process, expected a multiple of 2"),
    ],
    "trl.PPO": [
        ({"batch_size": 3, "gradient_accumulation_steps": 4}, r"batch_size must be a multiple of .* got 3 and 1 \* 4"),
        ({"batch_size": 6, "mini_batch_size": 4}, r"batch_size must be a multiple of .* got 6 and 4 \* 1"),
        ({"push_to_hub_if_best_kwargs": {"private": True}}, "must have 'repo_id'"),
    ],
    "trl.experimental.ppo.PPO": [({"stop_token": "eos", "stop_token_id": 3}, "cannot be combined")],
}  # fmt: skip


@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.filterwarnings("ignore:mini_batch_size is lowered")
def test_settings_that_cannot_be_combined_are_refused(name, tmp_path):
    config = CONFIGS[name]
    common = {"output_dir": str(tmp_path)} if issubclass(config, TrainingArguments) else {}
    for given, words in COMBINED[name]:
        with pytest.raises(ValueError, match=f"(?s){words}"):
            config(**common, **given)


UNREAD: dict[str, dict[str, dict[str, Any]]] = {
    "trl.DPO": {
        "label_smoothing": {"label_smoothing": 0.1, "loss_type": ["hinge", "sft"]},
        "discopop_tau": {"discopop_tau": 0.1},
        "f_alpha_divergence_coef": {"f_alpha_divergence_coef": 0.5},
        "precompute_ref_log_probs": {"precompute_ref_log_probs": True, "reference_free": True},
        "use_weighting": {"use_weighting": True, "loss_type": "sft"},
        "ld_alpha": {"ld_alpha": 0.5, "loss_type": ["sft"]},
        "f_divergence_type": {**JS, "loss_type": ["sft"]},
    },
    "trl.GRPO": {
        "delta": {"delta": 2.0, "loss_type": "cispo", "epsilon_high": 5.0},
        "epsilon": {"epsilon": 0.1, "loss_type": "cispo", "epsilon_high": 5.0},
        "epsilon_high": {"epsilon_high": 0.3, "loss_type": "sapo"},
        "max_resampling_rounds": {"max_resampling_rounds": 3},
        "sapo_temperature_pos": {"sapo_temperature_pos": 0.5},
        "vespo_k_neg": {"vespo_k_neg": 1.0, "loss_type": "sapo"},
        "importance_sampling_level": {"importance_sampling_level": "sequence", "loss_type": "vespo"},
        "vllm_importance_sampling_mode": {
            "vllm_importance_sampling_mode": "token_mask",
            "loss_type": "vespo",
        },
        "vllm_importance_sampling_cap": {"vllm_importance_sampling_cap": 2.0, "loss_type": "vespo"},
        "use_bias_correction_kl": {"use_bias_correction_kl": True},
        "vllm_guided_decoding_regex": {"vllm_guided_decoding_regex": "[0-9]+"},
        "log_unique_prompts": {"log_unique_prompts": True},
        "num_completions_to_print": {"num_completions_to_print": 3},
        "use_transformers_paged": {"use_transformers_paged": True},
        "cache_implementation": {"cache_implementation": "static"},
    },
}


@pytest.mark.parametrize(("name", "setting"), [(name, setting) for name in UNREAD for setting in UNREAD[name]])
def test_settings_that_nothing_reads_are_warned_about_once(name, setting, tmp_path):
    with pytest.warns(Warning, match=rf"{setting}(=.* has no effect| -> nothing)") as caught:
        CONFIGS[name](str(tmp_path), use_cpu=True, **UNREAD[name][setting])
    assert [each.filename for each in caught if setting in str(each.message)] == [__file__]
