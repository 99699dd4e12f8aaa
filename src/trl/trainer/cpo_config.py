"""Configuration of contrastive preference optimisation."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from trl.objectives.pairs import require_beta
from trl.objectives.reference_free import CPO_LOSSES, ReferenceFreeOptions
from trl.options.checks import check_one_of, warn_caller
from trl.options.dataset import DatasetPreparation
from trl.options.docs import documented
from trl.options.groups import changed_default
from trl.options.model import ModelInit
from trl.options.preference import (
    Dropout,
    EncoderDecoder,
    EvaluationSamples,
    LabelSmoothing,
    OlderCollation,
    PrefixSharing,
    PromptFirstLengths,
)
from trl.options.training import TrainingDefaults

SMOOTHED = ("sigmoid", "simpo")
"""Losses that label_smoothing acts on."""


@documented
@dataclass
class CPOConfig(
    EvaluationSamples,
    PrefixSharing,
    PromptFirstLengths,
    LabelSmoothing,
    Dropout,
    EncoderDecoder,
    OlderCollation,
    DatasetPreparation,
    ModelInit,
    TrainingDefaults,
):
    """Settings of `CPOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import CPOConfig
        >>> args = CPOConfig("my-model", loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=1.0, use_cpu=True)
        >>> args.loss_type, args.learning_rate
        ('simpo', 1e-06)
    """

    learning_rate: float = changed_default(TrainingArguments, "learning_rate", 1e-6)
    beta: float = field(
        default=0.1,
        metadata={
            "help": "Scale of the implicit reward, beta * log p. ipo: the inverse of twice the gap that it aims at."
        },
    )
    loss_type: str = field(
        default="sigmoid",
        metadata={
            "help": "Loss of a pair: sigmoid (CPO), hinge, ipo, simpo, or alphapo, which is simpo with cpo_alpha 0. ipo "
            "and simpo judge means over a completion's tokens, the others sums.",
            "choices": tuple(CPO_LOSSES),
        },
    )
    cpo_alpha: float = field(
        default=1.0,
        metadata={
            "help": "Weight of the chosen completions' negative log-likelihood, a mean over their tokens, in the loss. 0: "
            "none, as SimPO and AlphaPO want; with simpo above 0: CPO-SimPO."
        },
    )
    simpo_gamma: float = field(
        default=0.5, metadata={"help": "Margin by which the chosen reward is to exceed the rejected (simpo)."}
    )
    alpha: float = field(
        default=0.0,
        metadata={
            "help": "Bends the reward of every loss from log p to (1 - p^-alpha) / alpha (AlphaPO). 0: log p."
        },
    )

    def check(self) -> None:
        super().check()
        check_one_of("loss_type", self.loss_type, CPO_LOSSES)
        if self.loss_type == "alphapo":
            self._become_simpo()
        self.options()  # checks the settings of the loss
        if self.loss_type == "ipo" and self.beta == 0:
            raise ValueError(
                "beta must be > 0 for loss_type 'ipo', got 0. Its inverse is the gap that ipo aims at."
            )
        if not self.cpo_alpha:
            require_beta(self.beta, self.loss_type)
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            _warn_ignored("label_smoothing", self.label_smoothing, self.loss_type, "Use 0.")
        if self.simpo_gamma != 0.5 and self.loss_type != "simpo":
            _warn_ignored("simpo_gamma", self.simpo_gamma, self.loss_type, "Use loss_type='simpo'.")

    def _become_simpo(self) -> None:
        if self.cpo_alpha not in (0.0, 1.0):
            _warn_ignored("cpo_alpha", self.cpo_alpha, "alphapo", "Use 'simpo' with alpha and cpo_alpha.")
        self.loss_type, self.cpo_alpha = "simpo", 0.0

    def options(self) -> ReferenceFreeOptions:
        """The settings that the losses take."""
        return ReferenceFreeOptions(self.beta, self.label_smoothing, self.simpo_gamma, self.alpha)


def _warn_ignored(name: str, value: float, loss_type: str, remedy: str) -> None:
    warn_caller(f"{name}={value} has no effect on loss_type {loss_type!r}. {remedy}")
