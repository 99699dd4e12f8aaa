"""Every method that learns from judged completions, with the settings under which it is tested."""

from collections.abc import Callable
from typing import Any

from tests.trainer import cpo_runs, dpo_runs, kto_runs, prm_runs, reward_runs

Method = tuple[Callable[..., Any], dict[str, Any]]

DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair", "apo_zero",
    "apo_down", "discopop", "sft",
)  # fmt: skip

METHODS: dict[str, Method] = {
    **{f"dpo-{name}": (dpo_runs.make, {"loss_type": name, "beta": 0.3}) for name in DPO_LOSSES},
    "dpo-mixed": (
        dpo_runs.make,
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    ),
    "dpo-rpo": (dpo_runs.make, {"rpo_alpha": 0.5}),
    "dpo-wpo": (dpo_runs.make, {"use_weighting": True}),
    "dpo-ld": (dpo_runs.make, {"ld_alpha": 0.3}),
    "dpo-js": (dpo_runs.make, {"f_divergence_type": "js_divergence"}),
    "dpo-alpha": (dpo_runs.make, {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5}),
    "dpo-reference-free": (dpo_runs.make, {"reference_free": True}),
    "cpo-sigmoid": (cpo_runs.make, {"beta": 0.3}),
    "cpo-simpo": (cpo_runs.make, {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.5}),
    "cpo-ipo": (cpo_runs.make, {"loss_type": "ipo", "beta": 0.3}),
    "cpo-hinge": (cpo_runs.make, {"loss_type": "hinge", "beta": 0.3}),
    "cpo-alphapo": (cpo_runs.make, {"loss_type": "alphapo", "beta": 2.0, "alpha": 0.25}),
    "orpo": (cpo_runs.make_orpo, {"beta": 0.5}),
    "dpo-smoothed": (dpo_runs.make, {"label_smoothing": 0.1}),
    "kto": (kto_runs.make, {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}),
    "kto-apo": (kto_runs.make, {"loss_type": "apo_zero_unpaired"}),
    "bco": (kto_runs.make_bco, {"beta": 0.3}),
    "bco-matched": (kto_runs.make_bco, kto_runs.MATCHED),
    "reward": (reward_runs.make, {}),
    "reward-centered": (reward_runs.make, {"center_rewards_coefficient": 0.1}),
    "prm": (prm_runs.make, {}),
}


def with_bema(out: str, **settings: Any) -> Any:
    """DPO whose reference follows the bias-corrected average of the policy."""
    from trl.experimental.bema_for_ref_model import BEMACallback

    bema = BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=2)
    return dpo_runs.make(out, callbacks=[bema], **settings)


# What a run carries from step to step beside weights and optimiser: a moving reference, a running mean, columns.
RESUMED: dict[str, Method] = {
    "dpo-sigmoid": METHODS["dpo-sigmoid"],
    "dpo-bco_pair": METHODS["dpo-bco_pair"],
    "dpo-synced": (
        dpo_runs.make,
        {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.7},
    ),
    "cpo": METHODS["cpo-sigmoid"],
    "orpo": METHODS["orpo"],
    "dpo-bema": (with_bema, {}),
    "kto": METHODS["kto"],
    "bco": METHODS["bco"],
    "bco-matched": METHODS["bco-matched"],
    "reward": METHODS["reward"],
    "prm": METHODS["prm"],
    "dpo-precomputed": (dpo_runs.make, {"precompute_ref_log_probs": True}),
}
