"""DPOConfig: how values are read, what is refused or said."""

import math
import warnings

import pytest

from trl import DPOConfig


def config(**settings):
    return DPOConfig("out", use_cpu=True, **settings)


REFUSED = {
    "unknown loss": ({"loss_type": "kto_pair"}, "unknown loss_type 'kto_pair'; known are .*'sigmoid'"),
    "no loss": ({"loss_type": []}, "loss_type must name at least 1 loss"),
    "weights": ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, r"loss_weights must be 2"),
    "negative beta": ({"beta": -0.1}, r"beta must be >= 0, got -0\.1"),
    "beta 0 of ipo": ({"beta": 0, "loss_type": "ipo"}, "beta must be > 0 for loss_type 'ipo'"),
    "beta 0 of sppo": ({"beta": 0, "loss_type": "sppo_hard"}, "beta must be > 0 for loss_type 'sppo_hard'"),
    "smoothing": ({"label_smoothing": 0.5}, r"label_smoothing must be in \[0, 0\.5\), got 0\.5"),
    "negative smoothing": ({"label_smoothing": -0.1}, "label_smoothing must be in"),
    "divergence": ({"f_divergence_type": "kl"}, "f_divergence_type must be one of 'reverse_kl'.*got 'kl'"),
    "divergence of a loss on ratios": (
        {"f_divergence_type": "js_divergence", "loss_type": "nca_pair"},
        "'js_divergence' .*loss_type 'nca_pair'",
    ),
    "divergence in a mixture": (
        {"f_divergence_type": "alpha_divergence", "loss_type": ["sigmoid", "apo_zero"]},
        "got loss_type 'apo_zero'",
    ),
    "tau": ({"discopop_tau": 0.0, "loss_type": "discopop"}, "discopop_tau must be > 0"),
    "beta of text": ({"beta": "much"}, "beta must be a number, got 'much'"),
    "endless beta": ({"beta": float("inf")}, "beta must be a finite number >= 0"),
    "smoothing of no number": (
        {"label_smoothing": math.nan},
        r"label_smoothing must be a finite number in \[0, 0\.5\)",
    ),
    "weight that is no number": (
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [float("nan"), 1.0]},
        "loss_weights must be a finite number",
    ),
    "coefficient": ({"f_alpha_divergence_coef": float("nan")}, "f_alpha_divergence_coef must be a finite"),
    "ld_alpha": ({"ld_alpha": 1.5}, r"ld_alpha must be in \[0, 1\] or None, got 1\.5"),
    "rpo_alpha": ({"rpo_alpha": -1.0}, "rpo_alpha must be >= 0, got -1"),
    "sync and precompute": (
        {"sync_ref_model": True, "precompute_ref_log_probs": True},
        "sync_ref_model=True changes the reference while training",
    ),
    "sync without reference": (
        {"sync_ref_model": True, "reference_free": True},
        "has no reference that sync",
    ),
    "mixup": ({"ref_model_mixup_alpha": 1.2}, r"ref_model_mixup_alpha must be in \[0, 1\]"),
    "sync steps": ({"ref_model_sync_steps": 0}, "ref_model_sync_steps must be .*>= 1"),
    "batch size": ({"precompute_ref_batch_size": 0}, "precompute_ref_batch_size must be .*>= 1"),
    "truncation": ({"truncation_mode": "middle"}, "truncation_mode must be .*'middle'"),
    "max_length": ({"max_length": 0}, "max_length must be .*>= 1"),
    "max_prompt_length": ({"max_prompt_length": 0}, "max_prompt_length must be .*>= 1"),
    "sharing": ({"prefix_sharing": "maybe"}, "prefix_sharing must be .*'maybe'"),
    "label pad": ({"label_pad_token_id": 0}, "label_pad_token_id"),
    "json": ({"ref_model_init_kwargs": "{oops"}, "ref_model_init_kwargs must be a JSON object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_work(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        config(**settings)


IGNORED = {
    "label_smoothing": {"label_smoothing": 0.1, "loss_type": ["hinge", "sft"]},
    "discopop_tau": {"discopop_tau": 0.1},
    "f_alpha_divergence_coef": {"f_alpha_divergence_coef": 0.5},
    "precompute_ref_log_probs": {"precompute_ref_log_probs": True, "reference_free": True},
    "use_weighting": {"use_weighting": True, "loss_type": "sft"},
    "ld_alpha": {"ld_alpha": 0.5, "loss_type": ["sft"]},
    "f_divergence_type": {"f_divergence_type": "js_divergence", "loss_type": ["sft"]},
}


@pytest.mark.parametrize("name", IGNORED)
def test_a_setting_that_no_loss_reads_is_said_once(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config(**IGNORED[name])
    ours = [str(entry.message) for entry in caught if "has no effect" in str(entry.message)]
    assert len(ours) == 1 and ours[0].startswith(f"{name}=")
    assert [e.filename for e in caught if "has no effect" in str(e.message)] == [__file__]
