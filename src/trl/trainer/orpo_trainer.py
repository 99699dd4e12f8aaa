"""Odds-ratio preference optimisation: supervised fine-tuning and preferences in one loss, without a reference."""

from typing import ClassVar

from trl.legacy.pair_methods import LegacyORPO
from trl.methods.orpo import ORPOMethod
from trl.methods.reference_free import ReferenceFreeMethod
from trl.reporting.model_card import Paper
from trl.trainer.orpo_config import ORPOConfig
from trl.trainer.reference_free_trainer import ReferenceFreeTrainer


class ORPOTrainer(LegacyORPO, ReferenceFreeTrainer):
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
    args: ORPOConfig
