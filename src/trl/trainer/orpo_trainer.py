"""Odds-ratio preference optimisation: supervised fine-tuning and preferences in one loss, without a reference."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from trl.methods.orpo import ORPOMethod
from trl.methods.reference_free import ReferenceFreeMethod
from trl.objectives.pairs import PairScores
from trl.reporting.model_card import Paper
from trl.trainer.orpo_config import ORPOConfig
from trl.trainer.reference_free_trainer import ReferenceFreeTrainer


class ORPOTrainer(ReferenceFreeTrainer):
    """Trainer of odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691).

    Takes what `CPOTrainer` takes; `args` is an `ORPOConfig`. Predictions are beta times the mean log-probs.

    The loss is the negative log-likelihood of the chosen sequences, prompts included, a mean over all their tokens in
    an optimiser step, plus beta times the odds-ratio loss, a mean over all its pairs, of all micro-batches on all
    processes.

    Example:
        >>> from datasets import load_dataset
        >>> trainer = ORPOTrainer(
        ...     "Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train")
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "orpo"]
    _name: ClassVar[str] = "ORPO"
    _paper = Paper("ORPO: Monolithic Preference Optimization without Reference Model", "2403.07691")
    _method_class: ClassVar[type[ReferenceFreeMethod]] = ORPOMethod
    _config_class: ClassVar[type] = ORPOConfig
    _loss_method: ClassVar[str] = "odds_ratio_loss"
    _loss_sign: ClassVar[int] = -1
    args: ORPOConfig

    def odds_ratio_loss(
        self, policy_chosen_logps: Tensor, policy_rejected_logps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`beta log s(log odds ratio)` and the rewards of chosen and rejected, `(B,)` each, and the means of
        `log s(log odds ratio)` and of the log odds ratio, from mean log-probs `(B,)`.

        The first is what is subtracted from the likelihood's loss: the pairs' loss with its sign changed.
        """
        found = self.method.loss(PairScores.without_reference(policy_chosen_logps, policy_rejected_logps))
        rewards = self.method.rewards(policy_chosen_logps), self.method.rewards(policy_rejected_logps)
        means = found.metrics["log_odds_ratio"].mean, found.metrics["log_odds_chosen"].mean
        return -found.values, *rewards, *means
