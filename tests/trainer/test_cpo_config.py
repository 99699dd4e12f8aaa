"""CPOConfig and ORPOConfig: what is refused, what is said to do nothing."""

import dataclasses

import pytest

from trl.trainer.cpo_config import CPOConfig


def config(tmp_path, kind=CPOConfig, **given):
    return kind(str(tmp_path), use_cpu=True, **given)


def test_alphapo_is_simpo_without_likelihood(tmp_path):
    args = config(tmp_path, loss_type="alphapo", alpha=0.25)
    assert (args.loss_type, args.cpo_alpha, args.alpha) == ("simpo", 0.0, 0.25)
    again = dataclasses.replace(args, beta=2.0)
    assert (again.loss_type, again.cpo_alpha) == ("simpo", 0.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"loss_type": "dpo"},
            "loss_type must be one of 'sigmoid', 'hinge', 'ipo', 'simpo', 'alphapo', got 'dpo'",
        ),
        ({"beta": -0.1}, "beta must be >= 0, got -0.1"),
        ({"beta": 0.0, "loss_type": "ipo"}, "beta must be > 0 for loss_type 'ipo', got 0"),
        ({"beta": 0.0, "cpo_alpha": 0.0}, "beta must be > 0 for loss_type 'sigmoid', got 0"),
        ({"label_smoothing": 0.5}, r"label_smoothing must be in \[0, 0.5\), got 0.5"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 0.5\)"),
        ({"cpo_alpha": -1.0}, "cpo_alpha must be >= 0, got -1.0"),
        ({"simpo_gamma": -1.0, "loss_type": "simpo"}, "simpo_gamma must be >= 0, got -1.0"),
        ({"truncation_mode": "middle"}, "truncation_mode must be one of"),
        ({"max_prompt_length": 0}, "max_prompt_length"),
        ({"prefix_sharing": "yes"}, "prefix_sharing must be one of"),
        ({"label_pad_token_id": 0}, "label_pad_token_id"),
    ],
)
def test_settings_that_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **given)
