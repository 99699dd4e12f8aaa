"""KTO and BCO: completions that are judged one by one, against a reference policy."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from trl.collators.unpaired import REFERENCE_NAMES, single_completions
from trl.methods.method import Batch, Method, Outcome, Step
from trl.models.packed.layout import row_count
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.objectives.unpaired import UnpairedScores
from trl.tensors.reduce import LossTerms, Unit, weighted
from trl.tensors.sequences import sum_by_sequence


class UnpairedMethod(Method):
    """What the mathematics of KTO and BCO share: single completions, with the reference's log-probs in `ref_logps`.

    With two `completions_per_row`, of sequences 2i and 2i + 1 of a batch the first is row i's own, the second is
    mismatched.
    """

    units: ClassVar[tuple[Unit, ...]] = ("sequence",)

    def __init__(self, args: Any, *, completions_per_row: int = 1) -> None:
        self.args, self.completions_per_row = args, completions_per_row
        self.reference_names = [*REFERENCE_NAMES.values()][:completions_per_row]

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        """With the mean logits."""
        return ScoreOptions(mean_logits=True)

    def count(self, batch: Batch) -> Tensor:
        """How many rows a batch has."""
        return torch.tensor([row_count(batch)])

    def learned(self, batch: Batch) -> Batch:
        """The rows' own completions."""
        return single_completions(batch, 0, of=self.completions_per_row)

    def scores(self, batch: Batch, scored: Scored) -> UnpairedScores:
        """Log-probs of policy and reference of a batch's own completions."""
        logps = sum_by_sequence(scored.logps, scored.positions.sequence, row_count(batch))
        return UnpairedScores(logps, batch["ref_logps"].to(logps), batch["label"])

    def totals(self, batch: Batch, scored: Scored) -> Tensor:
        """Log-prob of each completion of a batch, the mismatched ones too."""
        count = row_count(batch) * self.completions_per_row
        return sum_by_sequence(scored.logps, scored.positions.sequence, count)

    def outcome(self, terms: LossTerms, scores: UnpairedScores, scored: Scored) -> Outcome:
        """Terms with the metrics of logits; predictions are the rewards `(B,)`, labels 1 where desirable."""
        metrics = dict(terms.metrics)
        if scored.mean_logits is not None:
            is_chosen = scores.desirable[scored.positions.sequence]
            for name, mask in (("chosen", is_chosen), ("rejected", ~is_chosen)):
                metrics[f"logits/{name}"] = weighted(scored.mean_logits, mask)
        labels = scores.desirable.to(torch.int64)
        return Outcome([terms._replace(metrics=metrics)], self.args.beta * scores.ratios, labels, scored.aux_loss)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """With `rewards/margins`: the difference of the mean rewards of the two kinds."""
        if "rewards/chosen" not in means or "rewards/rejected" not in means:
            return means
        return {**means, "rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}
