"""From scores to advantages: rewards per token, returns, generalised advantage estimation.

Tensors are `(B, T)`, one row per response; the mask is not 0 on tokens that the policy chose. What stands elsewhere
(prompt, padding, text that a tool wrote) is not read.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trl.tensors.moments import moments
from trl.tensors.reduce import Weighted, weighted, where_counted

Gaps = Literal["skip", "steps"]


class TokenRewards(NamedTuple):
    """Rewards per token `(B, T)`: with the score on the last token, and the KL's part alone; 0 outside of the mask."""

    rewards: Tensor
    non_score: Tensor


class Estimates(NamedTuple):
    """Advantages and returns `(B, T)`, detached; 0 outside of the mask."""

    advantages: Tensor
    returns: Tensor


def scale_scores(scores: Tensor, *, mean: float = 0.0, std: float = 1.0, clip: float | None = None) -> Tensor:
    """`(scores - mean) / std`, then cut to `[-clip, clip]`; any shape, float32.

    `std` is that of running moments; where it is no more than rounding beside the scores, they are not divided. Source:
    Zheng et al. 2023, Secrets of RLHF I, section 5 (arXiv:2307.04964).

    >>> scale_scores(torch.tensor([1.0, 5.0]), mean=1.0, std=2.0, clip=1.5)
    tensor([0.0000, 1.5000])
    """
    scores = scores.to(torch.float32)
    rounding = torch.finfo(scores.dtype).eps
    shifted = scores - mean
    largest = max(float(scores.abs().amax()), abs(mean)) if scores.numel() else 0.0
    scaled = shifted / (std + rounding) if std > rounding * largest else shifted
    return scaled if clip is None else scaled.clamp(-clip, clip)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> TokenRewards:
    """`-kl_coef * kl` on every token, and the response's score on its last one.

    `scores (B,)`, `kl`, `mask` `(B, T)`. Raises ValueError for rows without tokens, unlike shapes, scores not finite.

    >>> mask = torch.tensor([[1, 1, 0]])
    >>> token_rewards(torch.tensor([2.0]), torch.tensor([[0.5, 1.0, 9.0]]), mask, kl_coef=0.1).rewards
    tensor([[-0.0500,  1.9000,  0.0000]])
    """
    if kl.shape != mask.shape or scores.shape != mask.shape[:1]:
        shapes = f"{tuple(scores.shape)}, {tuple(kl.shape)} and {tuple(mask.shape)}"
        raise ValueError(f"scores must be (B,), kl and mask (B, T), got {shapes}.")
    if rows := (~torch.isfinite(scores)).nonzero()[:, 0].tolist():
        raise ValueError(f"scores must be finite, got NaN or infinity in rows {rows}. Check the reward.")
    if rows := (mask != 0).sum(dim=1).eq(0).nonzero()[:, 0].tolist():
        raise ValueError(f"every response must have a token that the policy chose, got none in rows {rows}.")
    non_score = where_counted(-kl_coef * kl.detach(), mask)
    rewards = non_score.clone()
    rewards[torch.arange(len(scores), device=kl.device), last_indices(mask)] += scores.to(kl.dtype)
    return TokenRewards(rewards, non_score)


def last_indices(mask: Tensor) -> Tensor:
    """Column of each row's last entry that is not 0, `(B, T) -> (B,)`; -1 where there is none.

    >>> last_indices(torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]]))
    tensor([ 2, -1])
    """
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return ((mask != 0) * columns).amax(dim=1) - 1


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95, gaps: Gaps = "skip"
) -> Estimates:
    """Generalised advantage estimates, `A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}`, and returns `A + V`.

    All `(B, T)`; the episode ends with the row's last token, after which values are 0. A run of masked-out tokens
    between two chosen ones (a tool's text) is no step of the policy: with `gaps="skip"` the next state is that of the
    next chosen token; `"steps"` keeps the rule of older programs, where each of them is a step of value 0. Source:
    Schulman et al. 2015, eq. 16 (arXiv:1506.02438).

    >>> found = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), torch.ones(1, 2), gamma=1.0, lam=0.5)
    >>> found.advantages, found.returns
    (tensor([[0.1250, 0.7500]]), tensor([[0.6250, 1.0000]]))
    """
    chosen = mask != 0
    rewards, values = where_counted(rewards, chosen), where_counted(values, chosen)
    advantages = torch.zeros_like(values)
    following, carried = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        surprise = rewards[:, step] + gamma * following - values[:, step]
        advantages[:, step] = surprise + gamma * lam * carried
        moves = chosen[:, step] if gaps == "skip" else torch.ones_like(chosen[:, step])
        following = torch.where(moves, values[:, step], following)
        carried = torch.where(moves, advantages[:, step], carried)
    return Estimates(where_counted(advantages, chosen), where_counted(advantages + values, chosen))


def rollout_metrics(
    rewards: TokenRewards, kl: Tensor, logps: Tensor, scores: Tensor, mask: Tensor
) -> dict[str, Weighted]:
    """The documented `objective/*` means of a batch of responses, and `ppo/*` of its rewards.

    KL, entropy (of sampled tokens) and the KL's reward are sums over a response; `ppo/mean_non_score_reward` is a mean.
    """
    non_score = rewards.non_score.sum(dim=1)
    return {
        "objective/kl": weighted(where_counted(kl, mask).sum(dim=1)),
        "objective/entropy": weighted(where_counted(-logps, mask).sum(dim=1)),
        "objective/non_score_reward": weighted(non_score),
        "objective/rlhf_reward": weighted(non_score + scores),
        "objective/scores": weighted(scores),
        "ppo/mean_scores": weighted(scores),
        "ppo/mean_non_score_reward": weighted(rewards.non_score, mask),
    }


def estimate_statistics(advantages: Tensor, returns: Tensor, values: Tensor, mask: Tensor) -> Mapping[str, Tensor]:
    """Means, and documented unbiased variances, of what a value loss learns from; over the mask, 0-dim."""
    of_returns, of_values = moments(returns, mask), moments(values, mask)
    return {
        "policy/advantages_mean": moments(advantages, mask).mean,
        "returns/mean": of_returns.mean,
        "returns/var": of_returns.variance,
        "val/mean": of_values.mean,
        "val/var": of_values.variance,
    }
