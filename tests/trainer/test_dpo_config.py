"""DPOConfig: how values are read, what is refused or said."""

import warnings

import pytest

from trl import DPOConfig


def config(**settings):
    return DPOConfig("out", use_cpu=True, **settings)


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
