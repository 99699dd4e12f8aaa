"""Contrastive preference optimisation and its variants: SimPO, CPO-SimPO, AlphaPO."""

from typing import TYPE_CHECKING

from torch import Tensor

from trl.methods.reference_free import ReferenceFreeMethod
from trl.objectives.pairs import PairScores, power_ratio
from trl.objectives.preference import CPO_LOSSES, cpo_terms
from trl.tensors.reduce import LossTerms

if TYPE_CHECKING:
    from trl.trainer.cpo_config import CPOConfig


class CPOMethod(ReferenceFreeMethod):
    """The mathematics of CPO, SimPO and AlphaPO."""

    args: "CPOConfig"

    @property
    def per_token(self) -> bool:  # type: ignore[override]
        return CPO_LOSSES[self.args.loss_type].per_token

    @property
    def nll_coefficient(self) -> float:  # type: ignore[override]
        return self.args.cpo_alpha

    def loss(self, scores: PairScores) -> LossTerms:
        return cpo_terms(scores, self.args.loss_type, self.args.options())

    def rewards(self, logps: Tensor) -> Tensor:
        return super().rewards(power_ratio(logps, self.args.alpha))
