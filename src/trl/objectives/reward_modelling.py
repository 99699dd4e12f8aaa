"""Losses of reward models: over pairs of completions (Bradley-Terry) and over the steps of one (process rewards)."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from trl.tensors.padding import IGNORED
from trl.tensors.reduce import LossTerms, weighted


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, center_coefficient: float | None = None
) -> LossTerms:
    """`-log sigmoid(r_c - r_r - margin) + coefficient (r_c + r_r)^2` of the rewards of each pair, with the metrics.

    `chosen`, `rejected` and `margin` (by how much the chosen one should win) are `(B,)`. The second part keeps rewards
    near 0, which the first leaves free. Raises ValueError for shapes that differ.
    Source: Ouyang et al. 2022, eq. 1 (arXiv:2203.02155); margin: Touvron et al. 2023, eq. 2 (arXiv:2307.09288);
    centering: Eisenstein et al. 2023 (arXiv:2312.09244).

    >>> bradley_terry(torch.tensor([1.0]), torch.tensor([0.0]), margin=torch.tensor([1.0])).values
    tensor([0.6931])
    """
    shapes = [tuple(t.shape) for t in (chosen, rejected, margin) if t is not None]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(f"rewards and margins of pairs must have one shape (B,), got {shapes}.")
    gap = chosen - rejected
    values = softplus(-gap if margin is None else margin - gap)
    if center_coefficient:
        values = values + center_coefficient * (chosen + rejected).square()
    metrics = {
        "mean_reward": weighted(torch.cat([chosen, rejected])),
        "accuracy": weighted(chosen > rejected),
        "margin": weighted(gap),
    }
    return LossTerms(values, torch.ones_like(values), "pair", metrics)


def step_classification(logits: Tensor, labels: Tensor) -> LossTerms:
    """Cross-entropy of the label at the end of each step, `logits (..., C)` and `labels (...)`, in nats.

    Labels are class indices (1: the step is right), `IGNORED` elsewhere; the terms have their shape. Logits at ignored
    positions are not read. Raises ValueError for shapes that do not fit.
    Source: Lightman et al. 2023 (arXiv:2305.20050).

    >>> step_classification(torch.zeros(2, 2), torch.tensor([1, -100])).values
    tensor([0.6931, 0.0000])
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels must be one per row of logits, got {tuple(labels.shape)}, {tuple(logits.shape)}.")
    ends = labels != IGNORED
    kept = torch.where(ends.unsqueeze(-1), logits, torch.zeros_like(logits)).flatten(0, -2)
    flat = cross_entropy(kept, labels.flatten(), ignore_index=IGNORED, reduction="none")
    return LossTerms(flat.view(labels.shape), ends.to(flat.dtype), "token", {})
