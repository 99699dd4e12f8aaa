"""Pairs with small numbers, shared by the tests of the losses over pairs."""

import math

import torch

from trl.objectives.pairs import PairScores

CHOSEN_RATIOS = (2.0, -1.0, 0.5)
REJECTED_RATIOS = (1.0, 3.0, -4.0)
REF_CHOSEN, REF_REJECTED = (-10.0, -20.0, -5.0), (-12.0, -8.0, -6.0)


def s(x: float) -> float:
    """The sigmoid, in plain Python."""
    return 1 / (1 + math.exp(-x))


def tensor(values, grad: bool = False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def scores_of(chosen_ratios=CHOSEN_RATIOS, rejected_ratios=REJECTED_RATIOS, step=None) -> PairScores:
    """Pairs with the given log-ratios over a fixed reference; the policy's log-probs are leaves."""
    ref_chosen, ref_rejected = (
        tensor(REF_CHOSEN)[: len(chosen_ratios)],
        tensor(REF_REJECTED)[: len(rejected_ratios)],
    )
    chosen = (ref_chosen + tensor(chosen_ratios)).requires_grad_()
    rejected = (ref_rejected + tensor(rejected_ratios)).requires_grad_()
    return PairScores(chosen, rejected, ref_chosen, ref_rejected, step)


def one_pair(chosen_ratio: float, rejected_ratio: float) -> PairScores:
    return scores_of((chosen_ratio,), (rejected_ratio,))


def gradients(loss, scores: PairScores) -> tuple[float, float]:
    """Derivatives of the summed loss by the chosen and the rejected log-probs of the first pair."""
    if not loss.requires_grad:
        return 0.0, 0.0
    found = torch.autograd.grad(loss.sum(), (scores.chosen, scores.rejected), allow_unused=True)
    chosen, rejected = (0.0 if grad is None else grad[0].item() for grad in found)
    return chosen, rejected
