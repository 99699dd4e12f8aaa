"""Losses of supervised fine-tuning, per trained token, from the token's log-probability."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trl.tensors.reduce import LossTerms
from trl.tensors.statistics import selective_log_softmax


def nll(logps: Tensor, mask: Tensor) -> LossTerms:
    """Negative log-likelihood of each trained token, `-log p`, in nats.

    `logps` and `mask` (not 0 where trained) have one shape, `(B, T)` or `(N,)`, the terms' too; else ValueError.

    >>> import torch
    >>> nll(torch.tensor([-0.5, -2.0]), torch.tensor([1, 0])).values
    tensor([0.5000, 2.0000])
    """
    if mask.shape != logps.shape:
        raise ValueError(f"logps and mask must have one shape, got {tuple(logps.shape)}, {tuple(mask.shape)}.")
    return LossTerms(-logps, (mask != 0).to(logps.dtype), "token", {})


def dft(logps: Tensor, mask: Tensor) -> LossTerms:
    """Dynamic fine-tuning: each trained token's `-log p`, weighted by its own probability, `-sg(p) log p`.

    The weight carries no gradient, so a token's gradient is that of `-p`: tokens that the model finds
    unlikely pull less. Shapes as in `nll`. Source: Wu et al. 2025, eq. 9 (arXiv:2508.05629).

    >>> import torch
    >>> dft(torch.log(torch.tensor([0.5, 0.25])), torch.tensor([1, 1])).values
    tensor([0.3466, 0.3466])
    """
    return nll(logps, mask)._replace(values=-logps.detach().exp() * logps)


def dft_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """`dft` of a model's outputs, as `compute_loss_func` of a `transformers.Trainer`: 0-dim.

    `outputs.logits (B, T, V)`, `labels (B, T)` with -100 where nothing is trained. The sum over the trained tokens is
    divided by `num_items_in_batch`, by their number if None.
    """
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    mask = targets != -100
    terms = dft(selective_log_softmax(outputs.logits, targets.where(mask, 0)), mask)
    return (terms.values * terms.weights).sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch)


LOSS_TYPES: dict[str, Callable[[Tensor, Tensor], LossTerms]] = {"nll": nll, "dft": dft}
