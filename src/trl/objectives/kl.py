"""Ratios and divergences of a policy and another one (reference, sampler) per token; coefficients of a KL penalty.

`logps` and `ref_logps` are log-probabilities, in nats, of the same sampled tokens under policy and reference.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trl.options.checks import lookup
from trl.tensors.reduce import where_counted
from trl.tensors.statistics import cap_exp

LARGEST_LOG_RATIO = 20.0  # exp of it is 5e8: a larger ratio says no more, and sums of it would overflow


def probability_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """`p / p_old` of each token with gradient, 1 outside of the mask; the exponent is cut at `LARGEST_LOG_RATIO`.

    >>> probability_ratio(torch.tensor([0.0, 3.0]), torch.tensor([0.0, 0.0]), torch.tensor([1, 0]))
    tensor([1., 1.])
    """
    return cap_exp(where_counted(logps - old_logps, mask), LARGEST_LOG_RATIO)


def check_shapes(mask: Tensor, **tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor of another shape than the mask."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(f"{name} must have shape {tuple(mask.shape)}, got {tuple(tensor.shape)}.")


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`log p - log p_ref` of the sampled tokens: unbiased, of either sign; any one shape.

    Source: Schulman 2020, Approximating KL Divergence (joschu.net/blog/kl-approx.html).

    >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    tensor([ 0.5000, -1.0000])
    """
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, low variance, never negative. Source as in `k1`.

    >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    tensor([0.1250, 0.5000])
    """
    return (logps - ref_logps).square() / 2


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """`r - 1 - log r` with `r = p_ref / p`, `log r` at most 20: unbiased and never negative. Source as in `k1`.

    >>> k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]))
    tensor([0.0000, 0.7183])
    """
    log_ratio = ref_logps - logps
    return cap_exp(log_ratio, LARGEST_LOG_RATIO) - 1 - log_ratio


def absolute(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """The size of the log-ratio, whichever its sign.

    >>> absolute(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
    tensor([0.5000, 1.0000])
    """
    return (logps - ref_logps).abs()


def full(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """The divergence itself, `sum_v p(v) (log p(v) - log p_ref(v))`, from whole distributions, `(..., V) -> (...)`.

    >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]])
    >>> full(p.log(), q.log())
    tensor([0.3466])
    """
    probabilities = logps.exp()
    terms = probabilities * (logps - ref_logps)
    return torch.where(probabilities > 0, terms, torch.zeros_like(terms)).sum(dim=-1)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
KL_PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": k1, "abs": absolute, "mse": k2, "full": full}


def kl_penalty(logps: Tensor, ref_logps: Tensor, kind: str) -> Tensor:
    """The penalty or estimate of a given name (`kl`, `abs`, `mse`, `full`, `k1`, `k2`, `k3`), per token.

    `(B, T)` log-probs of the sampled tokens; `full` takes those of the whole vocabulary, `(B, T, V)`. Raises ValueError
    for unlike shapes and unknown names.

    >>> kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), "mse")
    tensor([[2.]])
    """
    penalty = lookup(KL_PENALTIES | KL_ESTIMATORS, kind, "kl_penalty")
    if logps.shape != ref_logps.shape:
        shapes = f"{tuple(logps.shape)} and {tuple(ref_logps.shape)}"
        raise ValueError(f"log-probs of policy and reference must have one shape, got {shapes}.")
    return penalty(logps, ref_logps)


@dataclass
class AdaptiveKLController:
    """A KL coefficient, `value`, that is moved to where the mean KL per sequence is `target` nats.

    The proportional error `kl / target - 1`, cut to 0.2, changes it over a `horizon` of samples.
    Source: Ziegler et al. 2019, section 2.2 (arXiv:1909.08593). Raises ValueError for a target or horizon <= 0.
    """

    init_kl_coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("target", "horizon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}, unless adap_kl_ctrl=False.")
        self.value = self.init_kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Take in the mean KL of the latest `n_steps` samples (over all processes)."""
        error = min(max(float(current) / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


@dataclass
class FixedKLController:
    """A KL coefficient, `value`, that stays what it is."""

    kl_coef: float

    def __post_init__(self) -> None:
        self.value = self.kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Nothing changes."""
