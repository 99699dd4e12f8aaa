"""The mathematics of the methods that learn from their own rollouts."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from trl.methods.method import Batch, Method, Outcome, Scoring, Step
from trl.models.packed.layout import ROLLOUT
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.objectives.group_advantages import Scale, has_no_variance
from trl.objectives.group_policy import EXTREMES, GroupTokens
from trl.rewards.result import RewardInputs
from trl.rollouts.experience import (
    CHOSEN,
    CORRECTION,
    FIRST_OLD,
    LENGTH,
    OLD,
    REF,
    SCORES,
    STOPPED,
    TOOL_OUTPUT,
    TRAINED,
    Experience,
)
from trl.rollouts.measures import measured_groups, session_metrics
from trl.rollouts.token_counts import token_advantages
from trl.tensors.reduce import LossTerms, Unit, Weighted


class OnlineMethod(Method):
    """Base of the methods. `repeats_metrics`: log the measures of a rollout batch with each of its optimiser steps."""

    units: ClassVar[tuple[Unit, ...]] = ("token",)
    repeats_metrics: ClassVar[bool] = False
    needs_values: ClassVar[bool] = False
    pairs_rows: ClassVar[bool] = False
    """Whether the loss compares the completions of a group, which one process must have."""
    scores_reference: ClassVar[bool] = True
    needs_teacher: bool = False
    compares_old: bool = False
    """Whether rewards compare the policy's log-probs with the reference's: both must be of the scoring forward."""
    scores_teacher: bool = False
    """Whether it needs the teacher's log-probs of the sampled tokens."""
    temperature: float | None = None
    """Of the log-probs that are learned; None: that of sampling."""
    teacher_temperature: float | None = None
    """Of these log-probs; None: that of sampling."""

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """With the column `scores` and, per token, `trained`.

        `scores (B,)` are weighted sums of rewards, NaN where no source scored a row: it is not trained on. `inputs` is
        what the reward sources were given; `training` is False in an evaluation.
        """
        trained = ~scores.isnan()[experience.completions.row_index]
        return experience.with_rows(**{SCORES: scores.nan_to_num(0.0)}).with_tokens(**{TRAINED: trained})

    def needs_old(self, experience: Experience) -> bool:
        """Whether the first optimiser step on a rollout batch needs `old_logps`; later ones always do."""
        return True

    def __init_subclass__(cls, **settings: Any) -> None:
        """The loss of tokens that a method `wants` is that of its `objective`: another one has none, or says it."""
        super().__init_subclass__(**settings)
        if "objective" in vars(cls):
            cls.is_local = "wants" in vars(cls)

    is_local: ClassVar[bool] = False

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        return ScoreOptions(entropy="scored" if step.statistics else "none")

    def count(self, batch: Batch) -> Tensor:
        return self.divisor(batch[ROLLOUT]).view(1)

    def score(self, batch: Batch, scoring: Scoring) -> Any:
        """The log-probs of completion tokens: without gradient where their loss is taken in the same pass."""
        wants, step = self.wants(batch, scoring.step), scoring.step
        if not self.is_local or step.objective is not None or not torch.is_grad_enabled():
            wants = replace(wants, loss_of=None)
        return scoring.logps(batch, wants)

    @abstractmethod
    def objective(self, experience: Experience, scored: Any, step: Step) -> Sequence[LossTerms]:
        """The terms of a micro-batch's loss, each over the step's sum of `divisor`."""

    def terms(self, batch: Batch, scored: Any, step: Step) -> Outcome:
        """Those of the objective, and the extremes of what it measures; predictions are the log-probs."""
        rows = batch[ROLLOUT]
        terms = self.objective(rows, scored, step) if step.objective is None else step.objective(rows, scored)
        extremes = {name: part.metrics[n].mean for part in terms for name, n in EXTREMES.items() if n in part.metrics}
        local = scored.total if torch.is_grad_enabled() else None  # evaluations report the terms
        predictions, labels = None, None
        if isinstance(scored, Scored):
            predictions, labels = scored.logps.detach(), scored.positions.sequence
            if step.keep_entropies is not None and scored.entropies is not None:
                step.keep_entropies(rows, scored.entropies.detach()[: len(rows.completions.values)])
        return Outcome(terms, predictions, labels, scored.aux_loss, local=local, extremes=extremes)

    def divisor(self, experience: Experience) -> Tensor:
        """The share of these rows in the number that an optimiser step's loss is divided by, 0-dim."""
        return experience.per_token[TRAINED].sum().long()


class Corrected(NamedTuple):
    """Rows with a correction of the sampler's mismatch; its means, and its extremes among these rows."""

    experience: Experience
    means: Mapping[str, Weighted]
    extremes: Mapping[str, Tensor]


class GroupMethod(OnlineMethod):
    """Base of GRPO, RLOO and their variants.

    `rows` are columns per row of all processes, where the `group_size` completions of a prompt follow each other;
    rewards are NaN where no source scored a completion. A method defines `rewards_and_advantages`, `objective`, and
    `divisor` (by default the number of rows).
    """

    reward_scale: Scale = "group"

    def __init__(self, args: Any) -> None:
        self.args = args

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """With `scores` (NaN: none) and, per token, `trained`: not where there is no reward, nor, with
        `mask_truncated_completions`, where a completion was truncated; never in the answers of tools."""
        rows = ~scores.isnan()
        if self.args.mask_truncated_completions:
            rows = rows & experience.per_row[STOPPED].bool()
        trained = rows[experience.completions.row_index]
        if TOOL_OUTPUT in experience.per_token:
            trained = trained & ~experience.per_token[TOOL_OUTPUT].bool()
        return experience.with_rows(**{SCORES: scores}).with_tokens(**{TRAINED: trained})

    # ---- of a rollout batch

    @abstractmethod
    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        """The reward and the advantage of each completion, `(N,)`."""

    def given_rewards(self, rows: Mapping[str, Tensor]) -> Tensor:
        """The rewards of the sources `(N,)`, with the method's bounds but without its penalties."""
        return rows[SCORES]

    def lacks_variance(self, rows: Mapping[str, Tensor], group_size: int) -> Tensor:
        """Groups with equal rewards, bool `(N / G,)`: they have no gradient."""
        return has_no_variance(self.given_rewards(rows), group_size)

    def with_teacher(self, experience: Experience) -> Experience:
        """With what the teacher's log-probs add to the advantages, where the method `scores_teacher`."""
        return experience

    def signals(self, experience: Experience) -> Tensor:
        """What each token of a rollout batch is learned from, `(K,)`: not at all where it is 0."""
        return token_advantages(experience)

    def mean_length(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Mean number of tokens of the completions that are trained on, 0-dim."""
        return rows[LENGTH].mean()

    def with_penalties(self, experience: Experience) -> Experience:
        """With the columns per row that `rewards_and_advantages` needs beside the rewards."""
        return experience

    def corrected(self, experience: Experience, *, is_exact: bool, counted: Tensor) -> Corrected | None:
        """Correct the mismatch between sampler and trainer; None where there is nothing to correct.

        `counted` (bool `(B,)`): the rows that count in the metrics.
        """
        return None

    def metrics(self, rows: Mapping[str, Tensor], sources: Sequence[str], group_size: int) -> dict[str, Weighted]:
        """The documented metrics of rows of all processes."""
        return measured_groups(rows, sources, group_size, scale=self.reward_scale) | session_metrics(rows)

    def token_metrics(self, experience: Experience) -> dict[str, Weighted]:
        """Metrics of the tokens of this process's rows."""
        return {}

    # ---- of a micro-batch

    def tokens(self, experience: Experience, step: Step) -> GroupTokens:
        """The columns of a micro-batch; a column `advantage` per token precedes that per row."""
        columns, sequence = experience.per_token, experience.completions.row_index
        return GroupTokens(
            self.old_logps(experience, step), token_advantages(experience), columns[TRAINED], sequence,
            len(experience), columns.get(REF), columns.get(CORRECTION), columns.get(CHOSEN),
        )  # fmt: skip

    def old_logps(self, experience: Experience, step: Step) -> Tensor | None:
        """The denominator of ratios, `(K,)`; None for the policy that is being scored, in the first step on a rollout
        batch: there dropout and the rounding of another layout are no change of the policy.
        """
        return experience.per_token.get(FIRST_OLD if step.is_first else OLD)

    def divisor(self, experience: Experience) -> Tensor:
        return torch.tensor(len(experience))
