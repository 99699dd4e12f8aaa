"""What stops a step of PPO, or is told once: divergences and ratios that are too large, numbers that are not finite."""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from trl.tensors.reduce import Weighted, where_counted

logger = logging.getLogger("trl.trainer.ppo_trainer")

_NEGATIVE = -1.0  # nats per response: no longer chance
_FAR = 10.0  # times the target: the controller has lost it
_EXPLODED = 20.0  # nats per token: policy and reference have nothing in common
_ADVICE = (
    "Lower learning_rate or ppo_epochs, raise init_kl_coef, set early_stopping or max_grad_norm, or check the rewards."
)


class WarnOnce:
    """Logs each message once, with the values of its first time."""

    def __init__(self) -> None:
        self._messages: set[str] = set()

    def __call__(self, message: str, *values: Any) -> None:
        """Warn."""
        if message not in self._messages:
            self._messages.add(message)
            logger.warning(message, *values)


def check_finite(name: str, value: float, *, step: int) -> None:
    """Raise FloatingPointError, with advice, for a number of a step that is not finite."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"{name} must be finite, got {value} in step {step}. No update was made with it; go on from the last state "
            "that was saved. Lower learning_rate, set max_grad_norm, or look at the scores of this step."
        )


def check_divergence(
    kls: Tensor,
    differences: Tensor,
    mask: Tensor,
    *,
    accelerator: Accelerator,
    step: int,
    target: float,
    warn: Callable[..., None],
) -> None:
    """Warn of a KL divergence `(B, R)` that is negative or far above the target; all processes must call it.

    `differences` are those of log-probs. Raises: FloatingPointError where it has exploded or is not finite.
    """
    sizes = where_counted(differences, mask).double().abs().sum()
    sums = [where_counted(kls, mask).double().sum(), sizes, sizes.new_tensor(len(mask)), (mask != 0).sum().double()]
    total, size, rows, tokens = accelerator.reduce(torch.stack(sums), reduction="sum").tolist()  # type: ignore[union-attr]
    kl, per_token = total / rows, size / tokens
    if not math.isfinite(kl) or not per_token <= _EXPLODED:
        raise FloatingPointError(
            f"the KL divergence from the reference has exploded in step {step}: {kl:.4g} nats per response, "
            f"{per_token:.4g} per token (at most {_EXPLODED:g}). No update was made; resume from the last state that "
            f"was saved. {_ADVICE}"
        )
    if kl < _NEGATIVE:
        warn(
            "The KL divergence is negative (%.3g nats per response in step %d), which training can exploit. Sample "
            "from the plain distribution (do_sample=True, top_k=0, top_p=1.0, min_length=-1): with other settings the "
            "policy is rewarded for tokens that generation cut away.", kl, step,
        )  # fmt: skip
    if kl > _FAR * target:
        message = f"The KL divergence is %.3g nats per response in step %d, %g times the target of %g. {_ADVICE}"
        warn(message, kl, step, _FAR, target)


def ratio_is_too_large(
    ratio: Weighted, threshold: float, accelerator: Accelerator, warn: Callable[..., None], *, step: int
) -> bool:
    """Whether the mean ratio of new to old probabilities exceeds a threshold; all processes must call it."""
    whole = accelerator.reduce(torch.stack([ratio.total, ratio.count]), reduction="sum")
    mean = float(whole[0] / whole[1])
    if not mean > threshold:
        return False
    warn(
        "A minibatch is left out in step %d: the mean ratio of new to old probabilities is %.3g, ratio_threshold is "
        "%g. If this happens often, lower learning_rate or ppo_epochs, or set max_grad_norm.", step, mean, threshold,
    )  # fmt: skip
    return True
