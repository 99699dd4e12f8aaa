"""XPO: online DPO against completions of the reference, with optimism."""

from typing import ClassVar

from trl._lazy import attach
from trl.legacy.interface import View
from trl.methods.xpo import XPOMethod
from trl.reporting.model_card import Paper
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.trainer.xpo_config import XPOConfig

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


class XPOTrainer(OnlineDPOTrainer):
    """Trainer of exploratory preference optimisation (Xie et al. 2024, arXiv:2405.21046).

    Takes what `OnlineDPOTrainer` takes. Each completion of the policy is compared with one of the reference; the
    policy's log-probability of the latter is lowered by the weight `alpha`, which keeps it exploring.

    Example:
        >>> trainer = XPOTrainer(
        ...     "Qwen/Qwen3-0.6B", judge=judge, args=XPOConfig("explorer"), train_dataset=dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "xpo"]
    _name: ClassVar[str] = "XPO"
    _paper = Paper(
        "Exploratory Preference Optimization: Harnessing Implicit Q*-Approximation for Sample-Efficient RLHF",
        "2405.21046",
    )
    args: XPOConfig
    method_type = XPOMethod
    config_type = XPOConfig
    alpha = View(lambda trainer: trainer.method.of_epoch("alpha"))  # of the present epoch
