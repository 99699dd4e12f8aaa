"""XPO: online DPO against completions of the reference, with optimism."""

from typing import TYPE_CHECKING

import torch

from trl.methods.method import Step
from trl.methods.online_dpo import OnlineDPOMethod
from trl.models.scoring.causal import Scored
from trl.objectives.online_preference import by_epoch
from trl.rollouts.experience import SCORES, STOPPED, Experience
from trl.tensors.reduce import LossTerms, weighted

if TYPE_CHECKING:
    from trl.trainer.xpo_config import XPOConfig


class XPOMethod(OnlineDPOMethod):
    """The pair loss plus `alpha log p` of the reference's completion, which is the second of its prompt."""

    args: "XPOConfig"

    @property
    def alpha(self) -> float:
        """Of the present epoch."""
        return by_epoch(self.args.alpha, self.epoch())

    def objective(self, experience: Experience, scored: Scored, step: Step) -> list[LossTerms]:
        policy, reference = self.sums(experience, scored.logps)
        rows, scores = experience.per_row, experience.per_row[SCORES]
        pairs = self.pairs(scores)
        terms = self.pair_terms(experience, pairs, policy, reference)
        optimism = self.alpha * policy[torch.maximum(pairs.chosen, pairs.rejected)] * pairs.weights.to(policy)
        model, opponent = scores.view(-1, 2).unbind(dim=1)
        known = ~(model + opponent).isnan()
        stopped, detached = rows[STOPPED].bool(), policy.detach()
        kl, entropy = (values.view(-1, 2).mean(dim=1) for values in (detached - reference, -detached))
        metrics = {
            **terms.metrics,
            "loss/dpo": weighted(terms.values),
            "loss/xpo": weighted(optimism),
            "objective/kl": weighted(kl, known),
            "objective/entropy": weighted(entropy, known),
            "val/model_contain_eos_token": weighted(stopped[::2]),
            "val/ref_contain_eos_token": weighted(stopped[1::2]),
            "alpha": weighted(torch.tensor([self.alpha])),
        }
        if not self.is_judged:
            metrics |= {
                "objective/model_scores": weighted(model, known),
                "objective/ref_scores": weighted(opponent, known),
                "objective/scores_margin": weighted(model - opponent, known),
            }
        return [terms._replace(values=terms.values + optimism, metrics=metrics)]
