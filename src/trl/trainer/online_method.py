"""The mathematics of a method that learns from its own rollouts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from trl.models.scoring.causal import Scored
from trl.models.scoring.head import LossOf, ScoreOptions
from trl.rewards.inputs import RewardInputs
from trl.rollouts.columns import SCORES, TRAINED
from trl.rollouts.experience import Experience
from trl.tensors.reduce import LossTerms, Unit
from trl.trainer.method import Method


class StepContext(NamedTuple):
    """What a micro-batch's loss depends on beside its rows.

    `is_first`: in training, the policy has not been updated since the rollout. `is_exact`: the log-probs of sampling are those of
    the scoring forward.
    """

    is_first: bool
    is_exact: bool


class OnlineMethod(Method):
    """Base of the methods. `repeats_metrics`: log the measures of a rollout batch with each of its optimiser steps."""

    units: ClassVar[tuple[Unit, ...]] = ("token",)
    repeats_metrics: ClassVar[bool] = False
    needs_values: ClassVar[bool] = False

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """With the column `scores` and, per token, `trained`.

        `scores (B,)` are weighted sums of rewards, NaN where no source scored a row: it is not trained on. `inputs` is what
        the reward sources were given; `training` is False in an evaluation.
        """
        trained = ~scores.isnan()[experience.completions.row_index]
        return experience.with_rows(**{SCORES: scores.nan_to_num(0.0)}).with_tokens(**{TRAINED: trained})

    def needs_old(self, experience: Experience) -> bool:
        """Whether the first optimiser step on a rollout batch needs `old_logps`; later ones always do."""
        return True

    def options(self, *, statistics: bool) -> ScoreOptions:
        return ScoreOptions(entropy="scored" if statistics else "none")

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        return self.divisor(batch["experience"]).view(1)

    @abstractmethod
    def objective(self, experience: Experience, scored: Scored, context: StepContext) -> list[LossTerms]:
        """The terms of a micro-batch's loss, each over the step's sum of `divisor`."""

    def token_losses(self, experience: Experience, context: StepContext) -> LossOf | None:
        """The loss of each token, where it follows from the token's own log-prob; None where it does not.

        The head's gradient is then taken in the scoring forward, and `objective` has log-probs without gradient.
        """
        return None

    def divisor(self, experience: Experience) -> Tensor:
        """What these rows add to the number that an optimiser step's loss is divided by, 0-dim."""
        return experience.per_token[TRAINED].sum().long()
