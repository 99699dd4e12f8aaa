"""What a divergence from the reference says about a run: warnings, and a stop before it is wasted."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NEGATIVE = -1.0  # nats per response below which more than chance speaks
FAR = 10.0  # times the target: the controller has lost it
EXPLODED = 20.0  # nats per token: policy and reference have nothing in common

_GENERATION = (
    "Sample from the plain distribution (do_sample=True, top_k=0, top_p=1.0, min_length=-1): with other settings the policy is "
    "rewarded for tokens that generation cut away."
)
_ADVICE = "Lower learning_rate or ppo_epochs, raise init_kl_coef, set early_stopping or max_grad_norm, or check the rewards."


class DivergenceWatch:
    """Looks at each step's divergence before the update; each warning is given once."""

    def __init__(self, target: float) -> None:
        self.target = target
        self._said: set[str] = set()

    def check(self, kl: float, per_token: float, *, step: int) -> None:
        """`kl` in nats per response, `per_token` the mean size of a token's log-ratio, both over all processes.

        Raises: FloatingPointError where the policy has left the reference for good, or either is no number.
        """
        if not math.isfinite(kl) or not math.isfinite(per_token) or per_token > EXPLODED:
            raise FloatingPointError(
                f"the KL divergence from the reference has exploded in step {step}: {kl:.4g} nats per response, {per_token:.4g} "
                f"per token (at most {EXPLODED:g}). No update was made; go on from the last state that was saved. {_ADVICE}"
            )
        if kl < NEGATIVE:
            self._say(
                "negative",
                f"The KL divergence is negative ({kl:.3g} nats per response in step {step}), which training can exploit. "
                f"{_GENERATION}",
            )
        if kl > FAR * self.target:
            self._say(
                "far",
                f"The KL divergence is {kl:.3g} nats per response in step {step}, {FAR:g} times the target of {self.target:g}. "
                f"{_ADVICE}",
            )

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(message)


def mean_over_rows(values: Tensor, mask: Tensor, accelerator: object) -> tuple[float, float]:
    """Mean sum per row, and mean size per token where the mask is not 0, of all processes."""
    counted = torch.where(mask != 0, values.detach().double(), 0.0)
    sums = torch.stack(
        [
            counted.sum(),
            counted.new_tensor(float(len(values))),
            counted.abs().sum(),
            (mask != 0).sum().to(counted.dtype),
        ]
    )
    total, rows, size, tokens = accelerator.reduce(sums, reduction="sum").tolist()  # type: ignore[attr-defined]
    return total / rows, size / tokens
