"""XPO: online DPO against completions of the reference, with optimism."""

from __future__ import annotations

from typing import ClassVar

import torch

from trl._lazy import attach
from trl.models.scoring.causal import Scored
from trl.objectives.online_preference import by_epoch
from trl.reporting.model_card import Paper
from trl.rollouts.experience import SCORES, STOPPED, Experience
from trl.tensors.reduce import LossTerms, weighted
from trl.trainer.grpo_config import GroupTraining
from trl.trainer.online_dpo_trainer import OnlineDPOMethod, OnlineDPOTrainer
from trl.trainer.online_method import GroupMethod, StepContext
from trl.trainer.xpo_config import XPOConfig

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


class XPOMethod(OnlineDPOMethod):
    """The pair loss plus `alpha log p` of the reference's completion, which is the second of its prompt."""

    args: XPOConfig

    @property
    def alpha(self) -> float:
        """Of the present epoch."""
        return by_epoch(self.args.alpha, self.epoch())

    def objective(self, experience: Experience, scored: Scored, context: StepContext) -> list[LossTerms]:
        policy, reference = self.sums(experience, scored.logps)
        rows, scores = experience.per_row, experience.per_row[SCORES]
        pairs = self.pairs(scores)
        terms = self.pair_terms(experience, pairs, policy, reference)
        optimism = self.alpha * policy[torch.maximum(pairs.chosen, pairs.rejected)] * pairs.weights.to(policy)
        own, other = scores.view(-1, 2).unbind(dim=1)
        known = ~(own + other).isnan()
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
                "objective/model_scores": weighted(own, known),
                "objective/ref_scores": weighted(other, known),
                "objective/scores_margin": weighted(own - other, known),
            }
        return [terms._replace(values=terms.values + optimism, metrics=metrics)]


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
    method: XPOMethod
    method_type: ClassVar[type[GroupMethod]] = XPOMethod
    config_type: ClassVar[type[GroupTraining]] = XPOConfig
    has_opponent: ClassVar[bool] = True

    @property
    def alpha(self) -> float:
        """Weight of the optimism in the present epoch."""
        return self.method.alpha
