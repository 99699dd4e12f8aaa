"""Importance weights that correct a sampler whose probabilities differ from the trainer's.

Everything per token is flat, `(K,)`, with the row of each token in `sequence`; log-probs in nats.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trl.objectives.kl import LARGEST_LOG_RATIO, check_shapes
from trl.tensors.reduce import Weighted, weighted, where_counted
from trl.tensors.sequences import sum_by_sequence
from trl.tensors.statistics import cap_exp

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Correction(NamedTuple):
    """`factors (K,)` for the tokens' losses, detached, 1 outside of the mask.

    `ratios` are those behind them, `(K,)` or `(B,)` where they are those of sequences, and `counted` (bool, same shape)
    says which are of something trained. `gaps (K,)`: how far apart the two log-probs are.
    """

    factors: Tensor
    ratios: Tensor
    counted: Tensor
    gaps: Tensor


@torch.no_grad()
def correction(
    logps: Tensor, sampling_logps: Tensor, mask: Tensor, sequence: Tensor, count: int, *,
    mode: CorrectionMode = "sequence_mask", cap: float = 3.0,
) -> Correction:  # fmt: skip
    """The ratio `p / p_sampler` of each token, or of each of `count` sequences (a product), kept within `cap`.

    `logps` are the trainer's for the weights that sampled; `mode` says whose ratio it is, and whether one above the cap
    is cut to it or set to 0. Source: Yao et al. 2025 (truncation); Liu et al. 2025 (masking).

    >>> new, old = torch.log(torch.tensor([0.6, 0.4])), torch.log(torch.tensor([0.5, 0.1]))
    >>> correction(new, old, torch.ones(2), torch.tensor([0, 0]), 1, mode="token_truncate", cap=2.0).factors
    tensor([1.2000, 2.0000])
    """
    check_shapes(mask, logps=logps, sampling_logps=sampling_logps, sequence=sequence)
    log_ratios, trained = where_counted(logps - sampling_logps, mask), mask != 0
    counted = trained
    if mode.startswith("sequence"):
        ratios = sum_by_sequence(log_ratios, sequence, count).to(logps.dtype)
        counted = torch.bincount(sequence[trained], minlength=count) > 0
        ratios = _within(cap_exp(ratios, LARGEST_LOG_RATIO), cap, mode)
        factors = ratios[sequence]
    else:
        factors = ratios = _within(cap_exp(log_ratios, LARGEST_LOG_RATIO), cap, mode)
    factors = torch.where(trained, factors, 1.0)
    return Correction(factors, ratios, counted, log_ratios.abs())


def correction_metrics(corrected: Correction, mask: Tensor) -> dict[str, Weighted]:
    """`sampling/sampling_logp_difference/mean` in nats, `sampling/importance_sampling_ratio/mean`."""
    return {
        "sampling/sampling_logp_difference/mean": weighted(corrected.gaps, mask),
        "sampling/importance_sampling_ratio/mean": weighted(corrected.ratios, corrected.counted),
    }


def correction_extremes(corrected: Correction, mask: Tensor) -> dict[str, Tensor]:
    """The documented `sampling/*` extremes, 0-dim, of the rows of one process; empty where nothing is trained."""
    gaps, ratios = corrected.gaps[mask != 0], corrected.ratios[corrected.counted]
    if not len(ratios):
        return {}
    return {
        "sampling/sampling_logp_difference/max": gaps.max(),
        "sampling/importance_sampling_ratio/min": ratios.min(),
        "sampling/importance_sampling_ratio/max": ratios.max(),
    }


def _within(ratios: Tensor, cap: float, mode: CorrectionMode) -> Tensor:
    return torch.where(ratios > cap, 0.0, ratios) if mode.endswith("mask") else ratios.clamp(max=cap)
