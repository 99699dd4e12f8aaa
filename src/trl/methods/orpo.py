"""Odds-ratio preference optimisation: fine-tuning and preferences in one loss, without a reference."""

from typing import TYPE_CHECKING, ClassVar

from trl.methods.reference_free import ReferenceFreeMethod
from trl.objectives.pairs import PairScores
from trl.objectives.preference import orpo_terms
from trl.tensors.reduce import LossTerms

if TYPE_CHECKING:
    from trl.trainer.orpo_config import ORPOConfig


class ORPOMethod(ReferenceFreeMethod):
    """The mathematics of ORPO."""

    args: "ORPOConfig"
    scores_prompts: ClassVar[bool] = True
    per_token = True
    nll_coefficient = 1.0

    def loss(self, scores: PairScores) -> LossTerms:
        return orpo_terms(scores, beta=self.args.beta)
