"""From the rewards of groups of completions to advantages: each is judged against the others of its prompt.

Rewards are `(N,)`, those of a whole batch of rollouts (all processes): the `group_size` completions of a prompt stand
one after another. NaN is no opinion: such a completion counts in no mean, and its advantage is 0.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from trl.options.checks import lookup
from trl.tensors.reduce import Weighted, weighted

Scale = Literal["group", "batch", "none"]

SMALLEST_STD = 1e-4  # added to a deviation before advantages are divided by it
_SAME = 1e-8  # rewards of a group that deviate by no more than this are equal


class GroupMoments(NamedTuple):
    """Of each completion's group, `(N,)`: known rewards, mean and deviation (count - 1); 0 for too few."""

    count: Tensor
    mean: Tensor
    std: Tensor


def group_moments(rewards: Tensor, group_size: int) -> GroupMoments:
    """Mean and deviation of the rewards of each completion's group, `(N,) -> (N,)` each, in the rewards' dtype.

    Raises ValueError for a number of rewards that is no multiple of `group_size`, and for infinite rewards.

    >>> group_moments(torch.tensor([1.0, 3.0, 5.0, float("nan")]), group_size=2).std
    tensor([1.4142, 1.4142, 0.0000, 0.0000])
    """
    groups = _groups(rewards, group_size)
    known = ~groups.isnan()
    count = known.sum(dim=1, keepdim=True)
    mean = torch.where(known, groups, 0).sum(dim=1, keepdim=True) / count.clamp(min=1)
    square = torch.where(known, groups - mean, 0).square().sum(dim=1, keepdim=True)
    std = (square / (count - 1).clamp(min=1)).sqrt()
    return GroupMoments(*(part.expand_as(groups).reshape(-1) for part in (count, mean, std)))


def group_relative(rewards: Tensor, group_size: int, *, scale: Scale = "group") -> Tensor:
    """Each reward less its group's mean, `(N,) -> (N,)`; divided by a deviation unless `scale` is "none".

    "group": by that of the group (GRPO); "batch": by that of all N rewards; both over n - 1, and 1e-4 is added. A group
    whose rewards are all equal has advantages of 0, whatever the scale. Raises ValueError for unknown scales. Source:
    Shao et al. 2024, section 4.1.2 (arXiv:2402.03300); without scale Liu et al. 2025 (arXiv:2503.20783); by the batch
    Liu et al. 2025 (arXiv:2508.08221).

    >>> group_relative(torch.tensor([1.0, 3.0, 5.0, 5.0]), group_size=2, scale="none")
    tensor([-1.,  1.,  0.,  0.])
    """
    group = group_moments(rewards, group_size)
    # Not the rounding of a mean, divided by 1e-4.
    above = torch.where(rewards.isnan() | (group.std <= _SAME), 0.0, rewards - group.mean)
    deviation = lookup(SCALES, scale, "scale_rewards")(rewards, group)
    return above if deviation is None else above / (deviation + SMALLEST_STD)


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """Each reward less the mean of the others of its group, `(N,) -> (N,)`; 0 for equal ones (arXiv:2402.14740, eq. 8).

    >>> leave_one_out(torch.tensor([1.0, 3.0, 4.0, float("nan")]), group_size=2)
    tensor([-2.,  2.,  0.,  0.])
    """
    group = group_moments(rewards, group_size)
    others = (group.count - 1).clamp(min=1)
    above = (rewards - group.mean) * group.count / others
    return torch.where(rewards.isnan() | (group.std <= _SAME), 0.0, above)  # not a mean's rounding, which Adam enlarges


SCALES: dict[str, Callable[[Tensor, GroupMoments], Tensor | None]] = {
    "group": lambda rewards, group: group.std,
    "batch": lambda rewards, group: batch_deviation(rewards),
    "none": lambda rewards, group: None,
}


class AdvantageEstimator(Protocol):
    """The advantage of each completion, `(N,) -> (N,)`, from the rewards of the groups of one prompt each, in order.

    A reward is NaN where no source scored the completion; its advantage is set to 0, whatever is returned.
    """

    def __call__(self, rewards: Tensor, group_size: int, /) -> Tensor: ...


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "scaled_by_group": group_relative,
    "scaled_by_batch": partial(group_relative, scale="batch"),
    "unscaled": partial(group_relative, scale="none"),
    "leave_one_out": leave_one_out,
}
OF_SCALE: dict[str, str] = {"group": "scaled_by_group", "batch": "scaled_by_batch", "none": "unscaled"}
"""The row of each value of `scale_rewards`."""


def estimated(estimator: str | AdvantageEstimator, rewards: Tensor, group_size: int) -> Tensor:
    """Advantages `(N,)` by a row of `ADVANTAGES` or by a function. Raises: ValueError for others than N finite numbers.

    >>> estimated(lambda rewards, group_size: rewards - 1, torch.tensor([1.0, 3.0, float("nan")]), 3)
    tensor([0., 2., 0.])
    """
    function = lookup(ADVANTAGES, estimator, "advantage_estimator") if isinstance(estimator, str) else estimator
    result = function(rewards, group_size)
    advantages = rewards.new_full((1,), math.nan) if result is None else torch.as_tensor(result)
    if advantages.shape != rewards.shape or not (advantages.isfinite() | rewards.isnan()).all():
        got = f"shape {tuple(advantages.shape)}: {advantages.flatten()[:8].tolist()}"
        wanted = f"advantage_estimator must return {len(rewards)} finite numbers, one per reward"
        raise ValueError(f"{wanted}, got {got}. Return a tensor of the shape of rewards, without sums of NaN.")
    return torch.where(rewards.isnan(), 0.0, advantages)


def batch_deviation(rewards: Tensor) -> Tensor:
    """Deviation (over n - 1) of all rewards that are known, 0-dim; 0 where fewer than two are."""
    known = rewards[~rewards.isnan()]
    return known.std() if len(known) > 1 else rewards.new_zeros(())


def normalized(advantages: Tensor, known: Tensor | None = None) -> Tensor:
    """Advantages less their mean, over their deviation (n - 1, with 1e-4 added), `(N,) -> (N,)`.

    `known` (bool `(N,)`; None: all) says which are measured; the others stay as they are.

    >>> normalized(torch.tensor([-2.0, 2.0, 0.0]), torch.tensor([True, True, False]))
    tensor([-0.7071,  0.7071,  0.0000])
    """
    known = torch.ones_like(advantages, dtype=torch.bool) if known is None else known
    inside = advantages[known]
    if len(inside) < 2:
        return torch.where(known, 0.0, advantages)
    return torch.where(known, (advantages - inside.mean()) / (inside.std() + SMALLEST_STD), advantages)


def has_no_variance(rewards: Tensor, group_size: int) -> Tensor:
    """Groups from which nothing is learned, as their known rewards are all equal (or fewer than two): bool `(N / G,)`.

    Dynamic sampling refills these. Source: Yu et al. 2025, DAPO, section 3.2 (arXiv:2503.14476).

    >>> has_no_variance(torch.tensor([1.0, 1.0, 0.0, 1.0]), group_size=2)
    tensor([ True, False])
    """
    return group_moments(rewards, group_size).std.view(-1, group_size)[:, 0] <= _SAME


def best_of_groups(scores: Tensor, group_size: int, keep: int) -> Tensor:
    """The `keep` completions of each group with the largest scores, bool `(N,)`; of equals the earlier.

    Raises ValueError for scores that are NaN. Source: Shrivastava et al. 2025, GFPO, section 3 (arXiv:2508.09726).

    >>> best_of_groups(torch.tensor([1.0, 3.0, 3.0, -2.0, -1.0, -3.0]), group_size=3, keep=2)
    tensor([False,  True,  True,  True,  True, False])
    """
    if scores.isnan().any():
        raise ValueError(f"scores must be numbers, got NaN in row {int(scores.isnan().nonzero()[0])}.")
    groups = _groups(scores, group_size)
    ranks = groups.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (ranks < keep).view(-1)


def reward_statistics(rewards: Tensor, group_size: int, *, scale: Scale = "group") -> dict[str, Weighted]:
    """The documented `reward`, `reward_std` and `frac_reward_zero_std`, over the completions whose reward is known.

    `reward_std` is the mean of the groups' deviations; with `scale="batch"` the deviation of all rewards, and
    `frac_reward_zero_std` then asks whether that is 0.
    """
    known, std = ~rewards.isnan(), group_moments(rewards, group_size).std
    if scale == "batch":
        std = batch_deviation(rewards).expand_as(rewards)
    return {
        "reward": weighted(rewards, known),
        "reward_std": weighted(std, known),
        "frac_reward_zero_std": weighted((std <= _SAME).to(rewards.dtype), known),
    }


def _groups(rewards: Tensor, group_size: int) -> Tensor:
    """`(N,) -> (N / G, G)`."""
    if rewards.ndim != 1 or group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"rewards must be (N,), N a multiple of {group_size}, got {tuple(rewards.shape)}.")
    if rewards.isinf().any():
        rows = rewards.isinf().nonzero()[:, 0].tolist()
        raise ValueError(f"rewards must be finite, or NaN for no score, got infinity in rows {rows}.")
    return rewards.view(-1, group_size)
