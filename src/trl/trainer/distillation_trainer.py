"""On-policy distillation: a student learns a teacher's distributions on its own completions of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from trl.agents.tool_loop import tool_metrics
from trl.objectives.distillation import Divergence, TeacherLoss
from trl.options.groups import names_checked
from trl.options.training import config_or_default
from trl.reporting.model_card import Paper
from trl.rollouts.experience import SCORES, TRAINED, Experience
from trl.rollouts.measures import measured_lengths
from trl.tensors.reduce import LossTerms, Weighted, weighted
from trl.tensors.vocabulary_loss import Losses, VocabularyLoss
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.grpo_config import RolloutTraining
from trl.trainer.method import Outcome
from trl.trainer.online_method import GroupMethod, OnlineMethod, StepContext
from trl.trainer.online_trainer import AnyDataset, OnlineTrainer


@dataclass(frozen=True)
class WithEntropy(TeacherLoss):
    """A loss, and beside it the student's entropy, in nats."""

    loss: TeacherLoss

    def of_logits(self, student: Tensor, teacher: Tensor) -> Losses:
        values = self.loss.of_logits(student, teacher)
        return (values, _entropies(student)) if isinstance(values, Tensor) else values

    def of_top_k(self, student: Tensor, tokens: Tensor, teacher_logps: Tensor) -> Losses:
        values = self.loss.of_top_k(student, tokens, teacher_logps)
        return (values, _entropies(student)) if isinstance(values, Tensor) else values


def _entropies(logits: Tensor) -> Tensor:
    """`(C, V) -> (C, 1)`."""
    p = logits.detach().softmax(-1)
    return -torch.xlogy(p, p).sum(-1, keepdim=True)


class DistillationMethod(GroupMethod):
    """The divergence of student and teacher at each completion token, without rewards."""

    args: DistillationConfig
    needs_teacher, scores_reference = True, False
    divisor = OnlineMethod.divisor  # tokens

    @property
    def loss(self) -> TeacherLoss:
        """The divergence of a token."""
        return Divergence(self.args.beta)

    def token_weights(self, experience: Experience) -> Tensor:
        """What each completion token counts, `(K,)`."""
        trained = experience.per_token[TRAINED]
        return trained.to(torch.float32 if trained.device.type == "mps" else torch.float64)

    def needs_old(self, experience: Experience) -> bool:
        return False

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        return rows[SCORES], torch.zeros_like(rows[SCORES])

    def signals(self, experience: Experience) -> Tensor:
        return torch.ones(len(experience.completions.values))

    def objective(  # type: ignore[override]
        self, experience: Experience, scored: VocabularyLoss, context: StepContext
    ) -> list[LossTerms]:
        trained = experience.per_token[TRAINED]
        metrics: dict[str, Weighted] = {}
        if scored.statistics is not None and scored.statistics.shape[1]:
            metrics["entropy"] = weighted(scored.statistics[:, 0], trained)
        return [LossTerms(scored.values, trained.to(scored.values.dtype), "token", metrics)]

    def metrics(
        self, rows: Mapping[str, Tensor], sources: Sequence[str], group_size: int, *, share: float
    ) -> dict[str, Weighted]:
        return {**measured_lengths(rows, share=share), **tool_metrics(rows, share=share)}


class DistillationTrainer(OnlineTrainer):
    """Trainer of on-policy distillation: the student completes prompts and learns the teacher's distributions at its
    tokens.

    Args:
        model: the student: a causal language model, a `PeftModel`, or a name or path.
        teacher_model: a model of the same tokenizer, or its name or path. None: the one that the config names, or, of
        an
            adapter that trains, its base.
        args: a `DistillationConfig`.
        train_dataset: rows with a `prompt` (text or messages) or tokenised, with `input_ids`. A stream needs
        `max_steps`. eval_dataset: the same kind of rows, or a dict of several sets by name. processing_class: the
        student's tokenizer, or its processor where prompts have images. quantization_config: how the student is
        quantised when it is loaded by name or path. peft_config: trains a new adapter of the student with these
        settings. tools: functions, sync or async, that the student may call; their outputs are not trained on.

    The loss is the mean over the completion tokens of an optimiser step, of all its micro-batches on all processes
    (arXiv:2306.13649, with lmbda = 1).

    Example:
        >>> trainer = DistillationTrainer(
        ...     "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", DistillationConfig("student"), dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "distillation"]
    _name: ClassVar[str] = "on-policy distillation"
    _paper = Paper("On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", "2306.13649")
    args: DistillationConfig
    method: DistillationMethod
    method_type: ClassVar[type[GroupMethod]] = DistillationMethod
    config_type: ClassVar[type[RolloutTraining]] = DistillationConfig

    @names_checked
    def __init__(
        self,
        model: str | nn.Module | PreTrainedModel,
        teacher_model: str | nn.Module | PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        train_dataset: AnyDataset | None = None,
        eval_dataset: AnyDataset | dict[str, AnyDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any | None = None,
        peft_config: Any | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
    ) -> None:
        args = config_or_default(args, self.config_type, self._tag_names[-1])  # type: ignore[assignment]
        assert args is not None
        if quantization_config is not None:
            kwargs: Any = args.model_init_kwargs or {}
            if "quantization_config" in kwargs:
                raise ValueError(
                    "quantization_config was passed to the trainer and is in model_init_kwargs. Set one of them."
                )
            args.model_init_kwargs = {**kwargs, "quantization_config": quantization_config}
        super().__init__(
            model,
            None,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            teacher_model=teacher_model,
        )

    def outcome(self, model: nn.Module, batch: Mapping[str, Any], **given: Any) -> Outcome:
        """The divergence at the completion tokens of a micro-batch."""
        inputs = dict(batch)
        experience: Experience = inputs.pop("experience").to(self.args.device)
        found = self.learn(model, inputs, experience)
        terms = self.method.objective(experience, found, self.context)
        local = found.total if torch.is_grad_enabled() else None  # evaluations report the terms
        return Outcome(terms, None, None, found.aux_loss, local=local)

    def learn(self, model: nn.Module, inputs: dict[str, Any], experience: Experience) -> VocabularyLoss:
        """The divergence of some rows."""
        return self.from_teacher(model, inputs, self.method.token_weights(experience))

    def from_teacher(self, model: nn.Module, inputs: dict[str, Any], weights: Tensor) -> VocabularyLoss:
        """The divergence, times the `weights` `(K,)` of the tokens."""
        loss = WithEntropy(self.method.loss) if self.statistics_due() else self.method.loss
        with self.accelerator.autocast():
            return self.teacher.divergence(
                self.scorer, model, inputs, loss, temperature=self.sampling.temperature, weights=weights
            )
