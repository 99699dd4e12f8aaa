"""Where every sampled token of a rollout went: each is counted once, in one bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from trl.rollouts.columns import FILTERED, TOOL_OUTPUT

TRUNCATED = "truncated"
BUCKETS: tuple[str, ...] = (
    TOOL_OUTPUT,
    "reward_failed",
    TRUNCATED,
    FILTERED,
    "masked",
    "zero_advantage",
    "trained",
)
"""In the order in which they are asked: a token counts in the first that claims it."""


def token_ledger(
    advantages: Tensor,
    *,
    tool_output: Tensor | None = None,
    reward_failed: Tensor | None = None,
    truncated: Tensor | None = None,
    filtered: Tensor | None = None,
    masked: Tensor | None = None,
) -> dict[str, Tensor]:
    """How many of K completion tokens are in each of `BUCKETS`, int64 0-dim each; the counts add up to K.

    All `(K,)`, bool but for `advantages`; None: no token. `truncated`: of completions that are left out as they were cut off;
    `filtered`: of completions that were chosen against; `masked`: left out for another reason (a low entropy, a sampler's
    ratio above its cap). What is left is trained where its advantage is not 0. Raises ValueError for unlike shapes, and for
    an advantage that is NaN where it would count.

    >>> found = token_ledger(torch.tensor([1.0, 0.0, 0.0, -2.0]), truncated=torch.tensor([False, False, True, True]))
    >>> {name: int(count) for name, count in found.items() if count}
    {'truncated': 2, 'zero_advantage': 1, 'trained': 1}
    """
    claims = {
        TOOL_OUTPUT: tool_output,
        "reward_failed": reward_failed,
        TRUNCATED: truncated,
        FILTERED: filtered,
        "masked": masked,
    }
    left = torch.ones_like(advantages, dtype=torch.bool)
    counts: dict[str, Tensor] = {}
    for name, claim in claims.items():
        if claim is None:
            counts[name] = left.new_zeros((), dtype=torch.int64)
            continue
        if claim.shape != advantages.shape:
            raise ValueError(
                f"{name} must have one entry per token, {tuple(advantages.shape)}, got {tuple(claim.shape)}. Spread the rows' "
                "numbers over their tokens."
            )
        counts[name] = (left & claim.bool()).sum()
        left = left & ~claim.bool()
    if advantages[left].isnan().any():
        raise ValueError(
            "advantages must be numbers where tokens are trained, got NaN. Mark those tokens as reward_failed."
        )
    counts["zero_advantage"] = (left & (advantages == 0)).sum()
    counts["trained"] = (left & (advantages != 0)).sum()
    return counts
