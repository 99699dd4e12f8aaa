"""Configuration of direct preference optimisation."""

from dataclasses import dataclass
from enum import Enum

from transformers import TrainingArguments

from trl.objectives.pairs import PairOptions, require_beta
from trl.objectives.preference import PAIR_LOSSES, check_losses
from trl.options.checks import check_one_of, warn_unread
from trl.options.groups import documented, option, same
from trl.options.methods import PreferenceOptions, ReferencePolicy, ReferenceSync
from trl.options.shared import PrefixSharingMode, shared


class FDivergenceType(Enum):
    """The divergence from the reference that regularises the policy."""

    REVERSE_KL = "reverse_kl"
    JS_DIVERGENCE = "js_divergence"
    ALPHA_DIVERGENCE = "alpha_divergence"


class FDivergenceConstants:
    """Names and defaults of the divergences' settings."""

    ALPHA_DIVERGENCE_COEF_KEY = "alpha_divergence_coef"
    ALPHA_DIVERGENCE_COEF_DEFAULT = 1.0


@documented
@dataclass
class DPOConfig(ReferenceSync, ReferencePolicy, PreferenceOptions):
    """Settings of `DPOTrainer`: those of `transformers.TrainingArguments` and the ones below.

    Example:
        >>> from trl import DPOConfig
        >>> args = DPOConfig("my-model", loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2], use_cpu=True)
        >>> args.beta, args.label_smoothing, args.prefix_sharing
        (0.1, 0.0, 'auto')
    """

    learning_rate: float = same(TrainingArguments, "learning_rate", 1e-6)
    loss_type: list[str] = option(
        ["sigmoid"],
        "Loss of a pair, or several: sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, "
        "aot_pair, "
        "apo_zero, apo_down, discopop, sft. Averaged over the pairs of an optimiser step (sft: over the chosen "
        "completions' tokens).",
    )
    loss_weights: list[float] | None = option(None, "Weight of each loss of loss_type (MPO). None: 1 each.")
    label_smoothing: float = shared("label_smoothing")
    f_divergence_type: str = option(
        FDivergenceType.REVERSE_KL, "Regulariser of the policy: reverse_kl, js_divergence or alpha_divergence."
    )
    f_alpha_divergence_coef: float = option(
        1.0, "Alpha of the alpha divergence: u^-alpha, u the likelihood ratio.", "(-inf, inf)"
    )
    reference_free: bool = option(False, "Train as if the reference gave every completion the same probability.")
    use_weighting: bool = option(False, "Weigh each pair by its probability under the policy (WPO).")
    rpo_alpha: float | None = option(
        None,
        "Weight of the chosen completions' negative log-likelihood, a mean over their tokens, in the loss (RPO; the "
        "paper uses 1.0). None: none.",
    )
    ld_alpha: float | None = option(
        None, "Weight of log-probabilities past the shorter completion's length (LD-DPO). None: 1.", "[0, 1]"
    )
    discopop_tau: float = option(0.05, "Temperature of the discopop loss's modulation.", "> 0")
    force_use_ref_model: bool = option(
        False, "Use ref_model as the reference of a model with adapters too, instead of its own base model."
    )
    precompute_ref_batch_size: int | None = option(
        None,
        "Pairs per forward of precompute_ref_log_probs. None: per_device_train_batch_size (evaluation: "
        "per_device_eval_batch_size).",
        ">= 1",
    )
    tools: list[dict] | None = option(
        None,
        "JSON schemas of tools for the chat template of every prompt; rows may have their own in a column 'tools'.",
    )
    pad_token: str | None = shared("pad_token")
    padding_free: bool = shared("padding_free")
    prefix_sharing: PrefixSharingMode = shared("prefix_sharing")
    model_adapter_name: str | None = shared("model_adapter_name")
    ref_adapter_name: str | None = shared("ref_adapter_name")
    use_logits_to_keep: bool = option(False, "Deprecated: only completions are ever scored.")
    use_liger_loss: bool | None = shared("use_liger_loss")
    base_model_attribute_name: str = shared("base_model_attribute_name")

    def check(self) -> None:
        super().check()
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        if isinstance(self.f_divergence_type, str):
            check_one_of("f_divergence_type", self.f_divergence_type, [kind.value for kind in FDivergenceType])
            self.f_divergence_type = FDivergenceType(self.f_divergence_type)  # type: ignore[assignment]
        check_losses(self.loss_type, self.loss_weights, self.pair_options())
        if "sft" not in self.loss_type and not self.rpo_alpha:
            require_beta(self.beta, *self.loss_type)
        self._check_reference()
        self._warn_of_ignored()

    def _warn_of_ignored(self) -> None:
        """Warn of settings that no chosen loss reads."""
        divergence, losses = self.pair_options().f_divergence, set(self.loss_type)
        alone = losses == {"sft"}  # no loss compares a pair
        unread = {
            "use_weighting": alone,
            "ld_alpha": alone,
            "f_divergence_type": alone,
            "label_smoothing": not any(PAIR_LOSSES[name].smoothed for name in losses),
            "discopop_tau": "discopop" not in losses,
            "f_alpha_divergence_coef": divergence != "alpha_divergence",
            "precompute_ref_log_probs": self.reference_free,
        }
        chosen = f"loss_type={self.loss_type}, f_divergence_type={divergence!r}, reference_free={self.reference_free}"
        warn_unread(self, [name for name in unread if unread[name]], f"with {chosen}. Leave it out")

    def _check_reference(self) -> None:
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ValueError(
                "sync_ref_model=True changes the reference while training, and precompute_ref_log_probs=True scores "
                "with it once, before. Set one of them to False."
            )
        if self.reference_free and self.sync_ref_model:
            raise ValueError(
                "reference_free=True has no reference that sync_ref_model=True could change. Set one of them to False."
            )

    def pair_options(self) -> PairOptions:
        """The settings that the losses take."""
        divergence = self.f_divergence_type
        return PairOptions(
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            f_divergence=getattr(divergence, "value", divergence),
            f_alpha=self.f_alpha_divergence_coef,
            discopop_tau=self.discopop_tau,
        )
