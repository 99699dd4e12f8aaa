"""The mathematics of a method, without a trainer: what its loss is counted in, what is scored, and its terms.

A method is handed batches and a `Scoring`: the models of the run, and the optimiser step that a batch belongs to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from trl.models.packed.layout import STEP_PART, row_count, scored_sequences
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import Routing, ScoreOptions
from trl.models.switches import undisturbed, without_ddp
from trl.models.teacher import Teacher
from trl.objectives.distillation import TeacherLoss
from trl.reporting.metrics import Processes, RunningMean
from trl.tensors.reduce import LossTerms, Unit, Weighted, reduce_terms, share_of_step, weighted
from trl.tensors.vocabulary_loss import VocabularyLoss

Batch = Mapping[str, Any]
"""The tensors of some rows, and what belongs to their step, by name."""
LOSS_PARTS = "loss per "


@dataclass(frozen=True)
class StepPart:
    """What a batch must know of its optimiser step, in a form that nothing that moves or casts tensors changes.

    `plan`: what `Method.plan` made for it. `fills_up`: none of its rows is its process's own; it runs with the batches
    of the others, counted nowhere. `routing`: that of the step's tokens in a mixture of experts, of which the batch has
    the `share`. `exact`: entries of the batch that DeepSpeed would cast.
    """

    plan: Any = None
    fills_up: bool = False
    routing: Routing | None = None
    share: float | None = None
    exact: Mapping[str, Tensor] = field(default_factory=dict)


ALONE = StepPart()
"""That of a batch by itself, without an entry `STEP_PART`."""


class Outcome(NamedTuple):
    """Terms of a batch, and what is measured of it.

    `terms` add up to the loss, each divided by the step's number of its units. `predictions` `(B, ...)` and
    `labels` `(B, ...)` are what `compute_metrics` is given; None where they are not known. `local`: the sum of the
    losses whose gradient was taken in the scoring forward; the terms of these losses have no gradient. `extremes`:
    values of which a log shows the smallest (names with the word `min`, see `extreme_of`) or the largest.
    """

    terms: Sequence[LossTerms]
    predictions: Any
    labels: Any
    aux_loss: Tensor | None = None
    local: Tensor | None = None
    extremes: Mapping[str, Tensor] = {}

    def totals(self, units: Sequence[Unit], counts: Tensor, *, router_weight: float) -> list[Tensor]:
        """Summed losses for each kind of unit; the router's loss is a mean over the batch's units."""
        totals = [torch.zeros(()) for _ in units]
        if self.local is not None:
            totals[0] = self.local
        if self.aux_loss is not None:
            loss = self.aux_loss.to(torch.promote_types(self.aux_loss.dtype, torch.float32))
            totals[0] = totals[0] + router_weight * loss * counts[0]
        for terms in self.terms:
            if self.local is None or terms.values.requires_grad:  # others are summed up in `local`
                unit = units.index(terms.per) if len(units) > 1 else 0
                totals[unit] = totals[unit] + reduce_terms(terms, 1.0)
        return totals

    def loss(
        self, units: Sequence[Unit], counts: Tensor, step: Tensor, *, router_weight: float,
        router_share: float | None = None,
    ) -> Tensor:  # fmt: skip
        """The batch's part of the step's loss: its totals over the step's number of each kind of unit.

        `router_share`: that of the router's loss; None: the batch's share of the units.
        """
        if self.aux_loss is not None and router_share is not None:
            loss = self._replace(aux_loss=None).loss(units, counts, step, router_weight=0.0)
            return loss + router_weight * router_share * self.aux_loss
        totals = self.totals(units, counts, router_weight=router_weight)
        if len(step) != len(units):
            raise ValueError(
                f"num_items_in_batch must have the step's numbers of {', '.join(units)}, got {step.tolist()}. Leave it "
                "out for the loss of this batch alone."
            )
        return sum(map(share_of_step, totals, step), start=torch.zeros(()))


@dataclass(frozen=True)
class Step:
    """The optimiser step that a batch belongs to.

    `plan`: what `Method.plan` made for the batch; None for a batch by itself. `counts` `(len(units),)`: the step's
    number of each kind of unit; None for a batch by itself. `statistics`: costly ones will be logged. `outputs`:
    predictions are needed. `is_first`: the policy has not been updated since the rollout. `objective`: a program's own
    terms of a rollout, in place of the method's. `keep_entropies`: is handed the rows of a rollout and the entropies of
    their tokens.
    """

    training: bool
    processes: Processes
    plan: Any = None
    counts: Tensor | None = None
    statistics: bool = False
    outputs: bool = False
    is_first: bool = False
    objective: Callable[[Any, Scored], Sequence[LossTerms]] | None = None
    keep_entropies: Callable[..., None] | None = None


@dataclass(frozen=True)
class Scoring:
    """The models of a run, in its precision and at its temperature, for a batch of `step`.

    `model` may be wrapped. `reference_logps(batch)` computes the reference's log-probs of completions.
    """

    model: nn.Module
    scorer: Any
    accelerator: Accelerator
    step: Step
    reference_logps: Callable[[Batch], Tensor]
    teacher: Teacher | None = None
    temperature: float = 1.0

    def logps(self, batch: Batch, wants: ScoreOptions | None = None) -> Scored:
        """Log-probs of the scored tokens, and what is wanted beside them."""
        wants = replace(wants or ScoreOptions(), temperature=self.temperature)
        with self.accelerator.autocast():
            return self.scorer.score(self.model, batch, wants)

    @torch.no_grad()
    def with_routing(self, batches: Sequence[Batch], parts: Sequence[StepPart]) -> list[StepPart]:
        """The `parts` of a step's batches, with the routing of all of its tokens on all processes, counted first."""
        model = without_ddp(self.model)
        counts = []
        with undisturbed(model), self.accelerator.autocast():
            for batch, part in zip(batches, parts, strict=True):
                chosen, tokens = self.scorer.routing(model, batch)
                counts.append(torch.cat([tokens[None], chosen]) * (not part.fills_up))
        total = torch.stack(counts).sum(dim=0)
        if self.accelerator.num_processes > 1:
            total = self.step.processes.once(self.accelerator.reduce(total, reduction="sum"))  # type: ignore[arg-type]
        routing = Routing(total[1:], total[0])
        shares = [float(count[0] / total[0]) for count in counts]
        return [replace(part, routing=routing, share=share) for part, share in zip(parts, shares, strict=True)]

    @torch.no_grad()
    def frozen_logps(self, batch: Batch, wants: ScoreOptions | None = None) -> Scored:
        """`logps` without gradient, dropout and noise."""
        model = without_ddp(self.model)
        with undisturbed(model):
            return replace(self, model=model).logps(batch, wants)

    def reference(self, batch: Any, names: Sequence[str]) -> Tensor:
        """The reference's log-probs of a batch's completions `(S,)`, which its entries `names` keep."""
        if any(name not in batch for name in names):
            logps = self.reference_logps(batch).view(-1, len(names))
            batch.update(zip(names, logps.unbind(dim=1), strict=True))
        return torch.stack([batch[name] for name in names], dim=1).flatten()

    def with_logits(self, batch: Batch, wants: ScoreOptions | None = None) -> tuple[Scored, Tensor]:
        """`logps`, and the model's logits `(B, T, V)` of padded rows."""
        with self.accelerator.autocast():
            return self.scorer.score_with_logits(self.model, batch, wants)

    def divergence(
        self, batch: Batch, loss: TeacherLoss, *, weights: Tensor | None = None, temperature: float | None = None
    ) -> VocabularyLoss:
        """A loss over student's and teacher's distributions at the scored positions, times the `weights` `(K,)`."""
        assert self.teacher is not None
        temperature = self.temperature if temperature is None else temperature
        with self.accelerator.autocast():
            return self.teacher.divergence(
                self.scorer, self.model, batch, loss, temperature=temperature, weights=weights
            )


def counted(batch: Batch, values: Tensor) -> Weighted:
    """The sum of values of a batch and their number; 0 where the batch only fills up."""
    return weighted(values, torch.full_like(values, not batch.get(STEP_PART, ALONE).fills_up))


class Method:
    """Base of the methods, of rows of a data set as of rollouts."""

    units: ClassVar[tuple[Unit, ...]] = ("pair",)
    """What the terms are counted in; `count` gives as many numbers."""
    reference_names: Sequence[str] = ()
    """The entries of a batch with the reference's log-probs of each row's completions; none without a reference."""

    def count(self, batch: Batch) -> Tensor:
        """How many of each unit a batch has, int64 `(len(units),)`."""
        raise TypeError(f"{type(self).__name__} must override count.")

    def learned(self, batch: Batch) -> Batch:
        """The part of a batch that is scored with gradient."""
        return batch

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        """What is scored of a batch beside log-probs; `loss_of`: the loss of each token, where it follows from the
        token's own log-prob."""
        return ScoreOptions()

    def plan(self, batches: Sequence[Batch], scoring: Scoring) -> Sequence[Any]:
        """What each micro-batch of an optimiser step must know of the whole step. All processes call it."""
        return [None] * len(batches)

    def score(self, batch: Batch, scoring: Scoring) -> Any:
        """What `terms` are made of: by default the log-probs of the `learned` part, with what it `wants`."""
        if self.reference_names:
            scoring.reference(batch, self.reference_names)
        return scoring.logps(self.learned(batch), self.wants(batch, scoring.step))

    def terms(self, batch: Batch, scored: Any, step: Step) -> Outcome:
        """The terms of a batch, from what `score` made of it."""
        raise TypeError(f"{type(self).__name__} must override terms.")

    def labels(self, batch: Batch, scoring: Scoring) -> Tensor | None:
        """The labels of a batch for `compute_metrics`; None where they come with the predictions only."""
        return None

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics to log, from the means of those recorded."""
        return means

    mean_reward: RunningMean | None = None
    """The mean of the rewards counted so far in the run, for methods whose loss takes it."""

    def state(self) -> dict[str, Any]:
        """What the method carries from one step to the next, as plain values: part of every checkpoint."""
        return {} if self.mean_reward is None else {"rewards": self.mean_reward.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; from an empty one, begin anew."""
        if self.mean_reward is not None:
            self.mean_reward.load_state(state.get("rewards", {}))


class PairMethod(Method):
    """Base of the methods of pairs whose chosen completions' likelihood is trained too, per token."""

    units: ClassVar[tuple[Unit, ...]] = ("pair", "token")

    def count(self, batch: Batch) -> Tensor:
        """How many pairs a batch has, and how many scored tokens their chosen sequences."""
        chosen = (scored_sequences(batch) % 2 == 0).sum().cpu()
        return torch.stack([torch.tensor(row_count(batch, per_row=2)), chosen])
