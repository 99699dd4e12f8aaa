"""MiniLLM: policy gradient on the reverse KL from a teacher, split into this token's part and the later ones'."""

from typing import ClassVar

import torch
from torch import Tensor

from trl.experimental.minillm.minillm_config import MiniLLMConfig
from trl.methods.grpo import GRPOMethod
from trl.methods.method import Batch, Outcome, Scoring, Step
from trl.models.packed.layout import ROLLOUT
from trl.models.peft import AdapterConfig
from trl.models.scoring.causal import Scored
from trl.objectives.distillation import Divergence, discounted_advantages
from trl.objectives.group_policy import LOSS_TYPES
from trl.reporting.model_card import Paper
from trl.rewards.source import ProcessingClasses
from trl.rollouts.experience import MEAN_LENGTH, TRAINED, Experience
from trl.rollouts.maker import Completer
from trl.tensors.reduce import LossTerms, Weighted, weighted
from trl.tensors.vocabulary_loss import VocabularyLoss
from trl.trainer import arguments
from trl.trainer.group_setup import RewardFuncs, RolloutFunc, Tools
from trl.trainer.grpo_trainer import GRPOTrainer


def dummy_reward_func(completions: list, **kwargs: object) -> list[float]:
    """A reward of 0 for each completion: pure distillation."""
    return [0.0] * len(completions)


class MiniLLMMethod(GRPOMethod):
    """GRPO with the log-ratios of the later tokens as advantages, and the exact divergence at each token."""

    args: MiniLLMConfig

    def __init__(self, args: MiniLLMConfig) -> None:
        super().__init__(args)
        self.teacher_temperature = args.kd_temperature
        self.single_step = args.single_step_decomposition
        self.needs_teacher = args.rkl_advantage or self.single_step
        self.scores_teacher = args.rkl_advantage and (args.gamma > 0 or not self.single_step)

    def teacher_advantages(self, experience: Experience, gaps: Tensor) -> Tensor:
        """The discounted log-ratios of a token and the later ones, or of these alone, beside the exact part."""
        trained, advantages = experience.per_token[TRAINED], torch.zeros_like(gaps)
        advantages[trained] = discounted_advantages(
            gaps[trained], experience.completions.row_index[trained], len(experience), gamma=self.args.gamma,
            normalize=self.args.length_normalization, skip=self.single_step,
        )  # fmt: skip
        return super().teacher_advantages(experience, advantages)

    def signals(self, experience: Experience) -> Tensor:
        signals = super().signals(experience)
        return torch.ones_like(signals) if self.single_step else signals

    def exact_weight(self, experience: Experience) -> Tensor:
        """The weight of a token of the exact part, 0-dim.

        The loss has `teacher_kl_coef` times its mean over the tokens of a rollout batch, whatever the loss type
        divides by.
        """
        share = self.divisor(experience)
        if LOSS_TYPES[self.args.loss_type].over == "tokens":
            return self.args.teacher_kl_coef * torch.ones_like(share)
        return self.args.teacher_kl_coef * (share / (len(experience) * experience.per_row[MEAN_LENGTH][0]))

    def token_metrics(self, experience: Experience) -> dict[str, Weighted]:
        """GRPO's estimate of `teacher_kl`, where it is not the exact one of `terms`."""
        return {} if self.single_step else super().token_metrics(experience)

    def score(self, batch: Batch, scoring: Scoring) -> tuple[Scored, VocabularyLoss | None]:
        """What GRPO scores, and the exact divergence at each token."""
        scored, experience = super().score(batch, scoring), batch[ROLLOUT]
        if not self.single_step:
            return scored, None
        weights = experience.per_token[TRAINED] * self.exact_weight(experience)
        options = {"weights": weights, "temperature": self.teacher_temperature}
        return scored, scoring.divergence(self.learned(batch), Divergence(1.0), **options)

    def terms(self, batch: Batch, scored: tuple[Scored, VocabularyLoss | None], step: Step) -> Outcome:
        """GRPO's terms, and the divergence."""
        outcome, exact, experience = super().terms(batch, scored[0], step), scored[1], batch[ROLLOUT]
        if exact is None:
            return outcome
        trained = experience.per_token[TRAINED]
        measured = {"teacher_kl": weighted(exact.values / self.exact_weight(experience), trained)}
        terms = LossTerms(exact.values, trained.to(exact.values.dtype), outcome.terms[0].per, measured)
        local = exact.total if outcome.local is None else outcome.local + exact.total
        return outcome._replace(terms=[*outcome.terms, terms], local=local if torch.is_grad_enabled() else None)


class MiniLLMTrainer(GRPOTrainer):
    """Trainer of MiniLLM (Gu et al. 2024, arXiv:2306.08543).

    Takes what `GRPOTrainer` takes, and a `teacher_model`: a model of the same tokenizer, or its name or path.
    `reward_funcs=None` is pure distillation. Advantages have no gradient.

    Example:
        >>> trainer = MiniLLMTrainer(
        ...     "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", args=MiniLLMConfig("student"), train_dataset=dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "minillm"]
    _name: ClassVar[str] = "MiniLLM"
    _paper = Paper("MiniLLM: Knowledge Distillation of Large Language Models", "2306.08543")
    args: MiniLLMConfig
    method: MiniLLMMethod
    method_type = MiniLLMMethod
    config_type = MiniLLMConfig

    def __init__(
        self, model: arguments.AnyModel, teacher_model: arguments.AnyModel | None = None,
        reward_funcs: RewardFuncs = None, args: MiniLLMConfig | None = None,
        train_dataset: arguments.AnyDataset | None = None, eval_dataset: arguments.EvalDatasets | None = None,
        processing_class: arguments.Processor | None = None, reward_processing_classes: ProcessingClasses = None,
        callbacks: arguments.Callbacks | None = None, optimizers: arguments.Optimizers = (None, None),
        peft_config: AdapterConfig = None, rollout_func: RolloutFunc | None = None, tools: Tools | None = None,
        completer: Completer | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model, dummy_reward_func if reward_funcs is None else reward_funcs, args, train_dataset, eval_dataset,
            processing_class, reward_processing_classes, callbacks, optimizers, peft_config, tools, rollout_func,
            teacher_model, completer=completer,
        )  # fmt: skip
