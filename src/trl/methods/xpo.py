"""XPO: online DPO against completions of the reference, with optimism."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl.methods.online_dpo import OnlineDPOMethod
from trl.objectives.online_preference import RankedPairs
from trl.rollouts.experience import SCORES, STOPPED, Experience
from trl.tensors.reduce import LossTerms, Weighted, weighted

if TYPE_CHECKING:
    from trl.trainer.xpo_config import XPOConfig


class XPOMethod(OnlineDPOMethod):
    """The pair loss plus `alpha log p` of the reference's completion, which is the second of its prompt."""

    args: "XPOConfig"

    def pair_terms(self, experience: Experience, pairs: RankedPairs, policy: Tensor, reference: Tensor) -> LossTerms:
        terms = super().pair_terms(experience, pairs, policy, reference)
        second = torch.maximum(pairs.chosen, pairs.rejected)
        optimism = self.of_epoch("alpha") * policy[second] * pairs.weights.to(policy)
        metrics = {**terms.metrics, "loss/dpo": weighted(terms.values), "loss/xpo": weighted(optimism)}
        return terms._replace(values=terms.values + optimism, metrics=metrics)

    def row_metrics(self, experience: Experience, policy: Tensor, reference: Tensor) -> dict[str, Weighted]:
        """Means over prompts whose completions both have a score; those of end tokens over all prompts."""
        scores, stopped = (experience.per_row[name].view(-1, 2) for name in (SCORES, STOPPED))
        (model, opponent), known = scores.unbind(dim=1), ~scores.isnan().any(dim=1)
        columns = {"objective/kl": policy - reference, "objective/entropy": -policy}
        columns = {name: values.view(-1, 2).mean(dim=1) for name, values in columns.items()}
        if not self.is_judged:
            columns |= {"objective/model_scores": model, "objective/ref_scores": opponent}
            columns["objective/scores_margin"] = model - opponent
        sides = zip(("model", "ref"), stopped.bool().unbind(dim=1), strict=True)
        ends = {f"val/{name}_contain_eos_token": weighted(side) for name, side in sides}
        return {**{name: weighted(values, known) for name, values in columns.items()}, **ends}
