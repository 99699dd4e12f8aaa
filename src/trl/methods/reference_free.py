"""CPO and ORPO: pairs that are scored by the policy alone, and the likelihood of the chosen ones."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from trl.methods.method import Batch, Outcome, PairMethod, Step
from trl.models.packed.layout import row_count
from trl.models.scoring.causal import Scored, mean_logits
from trl.models.scoring.head import ScoreOptions
from trl.objectives.pairs import PairScores
from trl.objectives.preference import chosen_nll
from trl.tensors.reduce import LossTerms
from trl.tensors.sequences import positions_in_sequence, split_pairs, sum_by_sequence, tokens_by_sequence


class PairTokens(NamedTuple):
    """Which of K scored tokens are what, bool `(K,)`: of a chosen sequence (its prompt too, where that is scored), and
    of a prompt."""

    chosen: Tensor
    prompt: Tensor


class ReferenceFreeMethod(PairMethod):
    """What the mathematics of CPO and ORPO share.

    The loss is a mean over all pairs of an optimiser step, plus `nll_coefficient` times the chosen sequences' negative
    log-likelihood, a mean over all their scored tokens in that step.
    """

    scores_prompts: ClassVar[bool] = False  # the likelihood includes that of the chosen prompts, of a decoder
    per_token: bool  # completions are compared by means over their tokens, not by sums
    nll_coefficient: float  # the weight of the chosen sequences' likelihood

    def __init__(self, args: Any) -> None:
        self.args = args

    def loss(self, scores: PairScores) -> LossTerms:
        """The loss of each pair, with its metrics."""
        raise TypeError(f"{type(self).__name__} must override loss.")

    def rewards(self, logps: Tensor) -> Tensor:
        """The implicit rewards of completions, from what the loss knows of their log-probs, elementwise; detached."""
        return self.args.beta * logps.detach()

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        """With the mean logits."""
        return ScoreOptions(mean_logits=True)

    def terms(self, batch: Batch, scored: Scored, step: Step) -> Outcome:
        """The losses of a batch's pairs, and the likelihood of their chosen sequences."""
        scores = self.pair_scores(batch, scored)
        return self.outcome(self.loss(scores), scores, batch, scored)

    def outcome(self, terms: LossTerms, scores: PairScores, batch: Batch, scored: Scored) -> Outcome:
        """Terms of pairs with the chosen sequences' likelihood; predictions are the rewards."""
        tokens = _pair_tokens(scored, batch)
        nll = chosen_nll(scored.logps, tokens.chosen, coefficient=self.nll_coefficient)
        nll = nll._replace(metrics={**nll.metrics, **mean_logits(scored, ~tokens.prompt)})
        rewards = torch.stack([self.rewards(scores.chosen), self.rewards(scores.rejected)], dim=1)
        labels = torch.zeros(len(rewards), dtype=torch.int64, device=rewards.device)
        return Outcome([terms, nll], rewards, labels, scored.aux_loss)

    def pair_scores(self, batch: Batch, scored: Scored) -> PairScores:
        """Log-probs of a batch's completions: sums, or means where the loss takes means."""
        count, completion = 2 * row_count(batch, per_row=2), ~_pair_tokens(scored, batch).prompt
        sequence = scored.positions.sequence[completion]
        sums = split_pairs(sum_by_sequence(scored.logps[completion], sequence, count))
        scores = PairScores.without_reference(*sums)
        if not self.per_token:
            return scores
        return scores.per_token(*split_pairs(tokens_by_sequence(sequence, count)))


def _pair_tokens(scored: Scored, batch: Batch) -> PairTokens:
    sequence = scored.positions.sequence
    chosen, prompt_tokens = sequence % 2 == 0, batch.get("prompt_tokens")
    if prompt_tokens is None:
        return PairTokens(chosen, torch.zeros_like(chosen))
    prompts = torch.stack([prompt_tokens, torch.zeros_like(prompt_tokens)], dim=1).flatten()
    return PairTokens(chosen, positions_in_sequence(sequence, len(prompts)) < prompts[sequence])
