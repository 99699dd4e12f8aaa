"""Reward models: Bradley-Terry on pairs of which one is preferred."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl.methods.method import Batch, Method, Outcome, Scoring, Step
from trl.models.packed.layout import row_count
from trl.objectives.reward_modelling import bradley_terry

if TYPE_CHECKING:
    from trl.trainer.reward_config import RewardConfig


class RewardMethod(Method):
    """The mathematics of reward models: Bradley-Terry on the rewards `(B, 2)` of pairs."""

    def __init__(self, args: "RewardConfig") -> None:
        self.args = args

    def count(self, batch: Batch) -> Tensor:
        """How many pairs a batch has."""
        return torch.tensor([row_count(batch, per_row=2)])

    def score(self, batch: Batch, scoring: Scoring) -> Tensor:
        """Rewards `(B, 2)` of the preferred and the other sequence of each pair, at least in float32."""
        with scoring.accelerator.autocast():
            scores = scoring.scorer.score(scoring.model, batch)
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).view(-1, 2)

    def terms(self, batch: Batch, scored: Tensor, step: Step) -> Outcome:
        """The loss of a batch's pairs."""
        margin = batch.get("margin")
        terms = bradley_terry(
            *scored.unbind(dim=1), margin=None if margin is None else margin.to(scored),
            center_coefficient=self.args.center_rewards_coefficient,
        )  # fmt: skip
        labels = torch.zeros(len(scored), dtype=torch.int64, device=scored.device)
        smallest, largest = scored.detach().aminmax()
        return Outcome([terms], scored, labels, extremes={"min_reward": smallest, "max_reward": largest})
