"""Nash-MD: policy gradient on the preference for the policy over a mixture of itself and its reference."""

from typing import Any, ClassVar

from torch import Tensor

from trl._lazy import attach
from trl.legacy.interface import View
from trl.methods.nash_md import NashMDMethod
from trl.reporting.model_card import Paper
from trl.trainer.nash_md_config import NashMDConfig
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


class NashMDTrainer(OnlineDPOTrainer):
    """Trainer of Nash-MD (Munos et al. 2023, arXiv:2312.00886): learns to beat a mixture of policy and reference.

    Takes what `OnlineDPOTrainer` takes. The gradient is that of the preference less `beta` times the divergence of
    whole sequences from the reference; rewards give preferences by `sigmoid(r - r')`.

    Example:
        >>> trainer = NashMDTrainer(
        ...     "Qwen/Qwen3-0.6B", judge=judge, args=NashMDConfig("nash"), train_dataset=dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "nash-md"]
    _name: ClassVar[str] = "Nash-MD"
    _paper = Paper("Nash Learning from Human Feedback", "2312.00886")
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss", "rewards/probabilities")
    args: NashMDConfig
    method_type = NashMDMethod
    config_type = NashMDConfig
    mixture_coef = View("method.reference_share")  # of the present epoch

    def rows_of_step(self, step: int, sizes: Any = None) -> list[Tensor]:
        """The policy's completions alone."""
        return [rows[::2] for rows in super().rows_of_step(step, sizes)]
