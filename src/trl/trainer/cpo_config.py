"""Configuration of contrastive preference optimisation."""

from dataclasses import dataclass

from transformers import TrainingArguments

from trl.objectives.pairs import PairOptions, require_beta
from trl.objectives.preference import CPO_LOSSES
from trl.options.checks import check_one_of, warn_caller
from trl.options.groups import documented, option, same
from trl.options.methods import PromptFirstOptions
from trl.options.shared import PrefixSharingMode, shared


@documented
@dataclass
class CPOConfig(PromptFirstOptions):
    """Settings of `CPOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import CPOConfig
        >>> args = CPOConfig("my-model", loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=1.0, use_cpu=True)
        >>> args.loss_type, args.learning_rate
        ('simpo', 1e-06)
    """

    learning_rate: float = same(TrainingArguments, "learning_rate", 1e-6)
    beta: float = option(0.1, "Scale of the implicit reward, beta * log p. ipo: 1 / (2 * beta) is the gap it aims at.")
    loss_type: str = option(
        "sigmoid",
        "Loss of a pair: sigmoid (CPO), hinge, ipo, simpo, or alphapo (simpo with cpo_alpha 0). ipo and simpo take "
        "means over a completion's tokens, the others sums.",
        choices=tuple(CPO_LOSSES),
    )
    label_smoothing: float = shared("label_smoothing")
    cpo_alpha: float = option(
        1.0,
        "Weight of the chosen completions' negative log-likelihood, a mean over their tokens. 0: none (SimPO, "
        "AlphaPO); with simpo above 0: CPO-SimPO.",
    )
    simpo_gamma: float = option(0.5, "Margin by which the chosen reward is to exceed the rejected (simpo).")
    alpha: float = option(
        0.0, "Changes the reward of every loss from log p to (1 - p^-alpha) / alpha (AlphaPO). 0: log p.", "(-inf, inf)"
    )
    prefix_sharing: PrefixSharingMode = shared("prefix_sharing")

    def check(self) -> None:
        super().check()
        if self.loss_type == "alphapo":
            if self.cpo_alpha not in (0.0, 1.0):
                _warn_ignored("cpo_alpha", self.cpo_alpha, "alphapo", "Use 'simpo' with alpha and cpo_alpha.")
            self.loss_type, self.cpo_alpha = "simpo", 0.0
        check_one_of("loss_type", self.loss_type, CPO_LOSSES)
        if CPO_LOSSES[self.loss_type].divides_by_beta and self.beta == 0:
            raise ValueError("beta must be > 0 for loss_type 'ipo', got 0. Its inverse is the gap that ipo aims at.")
        if not self.cpo_alpha:
            require_beta(self.beta, self.loss_type)
        if self.label_smoothing and not CPO_LOSSES[self.loss_type].smoothed:
            _warn_ignored("label_smoothing", self.label_smoothing, self.loss_type, "Use 0.")
        if self.simpo_gamma != 0.5 and self.loss_type != "simpo":
            _warn_ignored("simpo_gamma", self.simpo_gamma, self.loss_type, "Use loss_type='simpo'.")

    def options(self) -> PairOptions:
        """The settings that the losses take."""
        return PairOptions(self.beta, self.label_smoothing, simpo_gamma=self.simpo_gamma, alpha=self.alpha)


def _warn_ignored(name: str, value: float, loss_type: str, remedy: str) -> None:
    warn_caller(f"{name}={value} has no effect on loss_type {loss_type!r}. {remedy}")
