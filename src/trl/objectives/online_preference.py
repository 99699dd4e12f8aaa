"""Online preferences: the pairs of ranked completions, the gradient of Nash-MD and the optimism of XPO."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trl.objectives.distillation import discounted_advantages
from trl.tensors.reduce import Weighted, weighted

Selection = Literal["best_worst", "all"]
TiePolicy = Literal["drop", "both"]


class RankedPairs(NamedTuple):
    """Pairs of rows by their numbers, int64 `(P,)`, and the weight of each; the weights of a comparison add up to 1."""

    chosen: Tensor
    rejected: Tensor
    weights: Tensor


def ranked_pairs(
    scores: Tensor, group_size: int, *, selection: Selection = "best_worst", ties: TiePolicy = "drop"
) -> RankedPairs:
    """The pairs of completions whose scores `(N,)` differ; neighbouring `group_size` rows answer one prompt.

    NaN scores are in no pair. `best_worst` takes one pair of each prompt, `all` compares each two completions. Ties are
    dropped, or trained in both orders with half the weight.

    >>> ranked_pairs(torch.tensor([1.0, 3.0, 2.0, 2.0]), 2)
    RankedPairs(chosen=tensor([1]), rejected=tensor([0]), weights=tensor([1.]))
    """
    groups = scores.view(-1, group_size)
    if selection == "all":
        firsts, seconds = torch.triu_indices(group_size, group_size, 1, device=scores.device)
        first, second = (part.expand(len(groups), -1) for part in (firsts, seconds))
    else:
        order = groups.nan_to_num(-torch.inf).argsort(dim=1, descending=True, stable=True)
        known = (~groups.isnan()).sum(dim=1, keepdim=True)
        first, second = order[:, :1], order.gather(1, (known - 1).clamp(min=0))
    offsets = torch.arange(len(groups), device=scores.device)[:, None] * group_size
    first, second = ((part + offsets).flatten() for part in (first, second))
    gap = scores[first] - scores[second]
    equal = (gap == 0) & (first != second) if ties == "both" else torch.zeros_like(gap, dtype=torch.bool)
    chosen = torch.cat([first[gap > 0], second[gap < 0], first[equal], second[equal]])
    rejected = torch.cat([second[gap > 0], first[gap < 0], second[equal], first[equal]])
    weights = torch.ones_like(chosen, dtype=scores.dtype)
    weights[len(weights) - 2 * int(equal.sum()) :] = 0.5
    order = torch.minimum(chosen, rejected).argsort(stable=True)  # by prompt
    return RankedPairs(chosen[order], rejected[order], weights[order])


def sequence_metrics(
    policy: Tensor, reference: Tensor, scores: Tensor, *, beta: float, with_scores: bool
) -> dict[str, Weighted]:
    """Means over completions: a sequence's divergence and entropy in nats, and the penalised scores.

    All `(B,)`; log-probs are sums over tokens, completions with a NaN score do not count. A judge's are left out.
    """
    policy, known = policy.detach(), ~scores.isnan()
    gap = policy - reference
    metrics = {
        "objective/kl": weighted(gap, known),
        "objective/entropy": weighted(-policy, known),
        "objective/non_score_reward": weighted(-beta * gap, known),
    }
    if with_scores:
        metrics["objective/scores"] = weighted(scores, known)
        metrics["objective/rlhf_reward"] = weighted(scores - beta * gap.to(scores), known)
    return metrics


def nash_advantages(preferences: Tensor, log_ratios: Tensor, sequence: Tensor, *, beta: float) -> Tensor:
    """`P - 1/2 - beta sum_(i >= t) r_i` of each token, `(B,), (K,), (K,) -> (K,)`, detached.

    `preferences` are the probabilities that a completion beats its opponent, `log_ratios` those of policy over
    reference. Policy gradient with these advantages is the exact gradient of `E[P] - beta KL(policy | reference)` over
    whole sequences. Source: Munos et al. 2023, section 7 (arXiv:2312.00886), with the KL of the tokens to come.

    >>> nash_advantages(torch.tensor([1.0]), torch.tensor([0.5, 1.0]), torch.tensor([0, 0]), beta=0.1)
    tensor([0.3500, 0.4000])
    """
    rest = discounted_advantages(log_ratios, sequence, len(preferences), gamma=1.0, normalize=False)
    return (preferences[sequence] - 0.5 - beta * rest).detach()


def by_epoch(values: float | Sequence[float], epoch: float) -> float:
    """The value of an epoch, the last one for later epochs; a number holds for all.

    >>> [by_epoch([0.1, 0.2], epoch) for epoch in (0.0, 0.99, 1.5, 7.0)]
    [0.1, 0.1, 0.2, 0.2]
    """
    return values if isinstance(values, (int, float)) else values[min(int(epoch), len(values) - 1)]
