"""The mathematics of a step of PPO as methods that a subclass may replace: rewards, advantages, losses, one minibatch."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from trl.objectives.advantages import estimate_statistics, gae, token_rewards
from trl.objectives.kl import AdaptiveKLController, FixedKLController, kl_penalty
from trl.objectives.policy_gradient import clipped_surrogate, probability_ratio, with_value_loss
from trl.objectives.value import clipped_value_loss
from trl.tensors.moments import moments, over_processes, whiten_by
from trl.tensors.reduce import Weighted, count_units, reduce_terms
from trl.tensors.statistics import entropy_from_logits
from trl.trainer.ppo_config import PPOConfig

logger = logging.getLogger(__name__)


class PPOLosses:
    """Tensors are `(B, R)`: column t belongs to token t of a response, and `mask` is 0 where the policy chose no token."""

    config: PPOConfig
    accelerator: Accelerator
    model: Any
    optimizer: Any
    kl_ctl: AdaptiveKLController | FixedKLController
    current_step: int
    _step_tokens: int | None = None
    _left_out: int = 0
    _gradient_is_used: bool = False

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards per token, their part without the score, and the penalty itself, each `(B, R)`.

        `logprobs` and `ref_logprobs` are those of the tokens, or with `kl_penalty="full"` of the whole vocabulary,
        `(B, R, V)`. The score `(B,)` is added on a response's last token.
        """
        kls = kl_penalty(logprobs, ref_logprobs, self.config.kl_penalty)
        rewards, non_score = token_rewards(scores, kls, masks, kl_coef=self.kl_ctl.value)
        return rewards, non_score, kls

    def compute_advantages(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values, advantages whitened over the batch of all processes, and returns, 0 outside of the mask."""
        if self.config.whiten_rewards:
            measured = over_processes(moments(rewards, mask), self.accelerator)
            rewards = whiten_by(rewards, measured, shift_mean=False)
        advantages, returns = gae(rewards, values, mask, gamma=self.config.gamma, lam=self.config.lam)
        measured = over_processes(moments(advantages, mask), self.accelerator)
        counted = (mask != 0).to(values.dtype)
        return values * counted, whiten_by(advantages, measured) * counted, returns

    def loss(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
        *,
        entropies: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Policy loss, value loss times `vf_coef`, both means over the minibatch's tokens, and statistics.

        The entropy is that of `logits (B, R, V)` unless `entropies` are given; without either it is left out. Both losses are
        0 where the mean ratio of probabilities exceeds `ratio_threshold`.
        """
        if entropies is None and logits is not None:
            entropies = entropy_from_logits(logits.detach())
        policy = clipped_surrogate(
            logprobs, old_logprobs, advantages, mask, cliprange=self.config.cliprange, entropies=entropies
        )
        value = clipped_value_loss(vpreds, values, returns, mask, cliprange_value=self.config.cliprange_value)
        terms = with_value_loss(policy, value, vf_coef=self.config.vf_coef)
        count = count_units(terms)
        losses = reduce_terms(policy, count), self.config.vf_coef * reduce_terms(value, count)
        stats = {name: metric.mean for name, metric in terms.metrics.items()}
        stats |= estimate_statistics(advantages, returns, values, mask)
        if self._ratio_is_too_large(terms.metrics["policy/ratio"]):
            losses = losses[0] * 0, losses[1] * 0
            stats |= {name: torch.zeros_like(stats[name]) for name in stats if name.startswith("loss/")}
        stats["policy/ratio"] = probability_ratio(logprobs.detach(), old_logprobs, mask)[mask != 0]
        stats["policy/advantages"] = advantages[mask != 0]
        return *losses, stats

    def train_minibatch(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logprobs: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
        *,
        entropies: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The loss of one minibatch, backward, and with the last of an optimiser step's minibatches the update.

        Inside `step` a token counts alike in whichever minibatch or process of an optimiser step it is. Returns the
        statistics of `loss`.

        Raises: FloatingPointError for a loss or gradient that is not finite, before the update.
        """
        policy_loss, value_loss, stats = self.loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns, entropies=entropies
        )
        loss = (policy_loss + value_loss) * self._share_of_step(mask)
        self._require_finite("loss", float(loss.detach()))
        if self._gradient_is_used:  # only outside of `step`, which has cleared it
            self._clear_gradient()
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            self._limit_gradient()
            self.optimizer.step()
            self._gradient_is_used = True
        return stats

    def _clear_gradient(self) -> None:
        """Clear the gradient of the last update, which stays in place until the next begins: programs read it."""
        self.model.zero_grad()
        if self.accelerator.state.deepspeed_plugin is None:  # DeepSpeed clears its own
            # Under FSDP2 the model may hold gathered parameters; those with gradients are the optimiser's.
            getattr(self.optimizer, "optimizer", self.optimizer).zero_grad()
        self._gradient_is_used = False

    def _share_of_step(self, mask: Tensor) -> float:
        """What turns the mean over a minibatch into its share of the mean over an optimiser step, before others divide.

        accelerate divides by the number of accumulated minibatches, DDP and its kin by the number of processes.
        """
        if self._step_tokens is None:
            return 1.0
        averaged = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        return float((mask != 0).sum()) * averaged / self._step_tokens

    def _limit_gradient(self) -> None:
        if self.config.max_grad_norm is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        else:
            norm = gradient_norm(self.model)
        if norm is not None and self.accelerator.scaler is None:  # fp16 leaves such updates out by itself
            self._require_finite("the gradient's norm", float(norm))

    def _ratio_is_too_large(self, ratio: Weighted) -> bool:
        if self.accelerator.num_processes > 1:
            whole: Any = self.accelerator.reduce(torch.stack([ratio.total, ratio.count]), reduction="sum")
            ratio = Weighted(whole[0], whole[1])
        if not float(ratio.mean) > self.config.ratio_threshold:
            return False
        self._left_out += 1
        if self._left_out == 1:
            logger.warning(
                "A minibatch is left out in step %d: the mean ratio of new to old probabilities is %.3g, ratio_threshold is %g. "
                "If this goes on, lower learning_rate or ppo_epochs, or set max_grad_norm.",
                self.current_step + 1, float(ratio.mean), self.config.ratio_threshold,
            )  # fmt: skip
        return True

    def _require_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{what} must be finite, got {value} in step {self.current_step + 1}. No update was made with it; go on from "
                "the last state that was saved. Lower learning_rate, set max_grad_norm, or look at the scores of this step."
            )


def gradient_norm(model: nn.Module) -> Tensor | None:
    """The norm of all gradients; None where there is none to see (DeepSpeed holds them)."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if gradients else None


@contextlib.contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Train mode inside; every module's own mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
