"""Teachers of distillation behind one interface: `teacher.compare(scorer, policy, batch, loss_of)`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Protocol

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from trl.models.parts import causal_core, embedded_tokens
from trl.models.policy import make_scorer
from trl.models.reference import FrozenModel
from trl.models.scoring.causal import Scorer
from trl.models.setup import load_model
from trl.tensors.vocabulary_loss import LossOfLogits, VocabularyLoss

logger = logging.getLogger(__name__)


class Teacher(Protocol):
    """Whose next-token distributions a student learns."""

    def prepare(self, accelerator: Accelerator) -> None:
        """Move its weights to the device, or shard them like the policy."""
        ...

    def compare(
        self,
        scorer: Scorer,
        policy: nn.Module,
        batch: Mapping[str, Any],
        loss_of: LossOfLogits,
        *,
        temperature: float = 1.0,
    ) -> VocabularyLoss:
        """The summed loss of the scored positions, as `Scorer.over_chunks`; gradients for `policy` only."""
        ...


class ModelTeacher(Teacher):
    """A frozen model with the student's tokenizer."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.frozen = FrozenModel(model, make_scorer(model, tokenizer))

    @property
    def model(self) -> nn.Module:
        """What is called: the module or its DeepSpeed engine."""
        return self.frozen.model

    def prepare(self, accelerator: Accelerator) -> None:
        self.frozen.prepare(accelerator)

    def compare(
        self,
        scorer: Scorer,
        policy: nn.Module,
        batch: Mapping[str, Any],
        loss_of: LossOfLogits,
        *,
        temperature: float = 1.0,
    ) -> VocabularyLoss:
        other = self.frozen.scorer, self.model
        return scorer.over_chunks(policy, batch, loss_of, other=other, temperature=temperature)


def make_teacher(
    teacher: Any,
    init_kwargs: Mapping[str, Any] | None,
    student: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
) -> ModelTeacher:
    """The teacher of `student`: a model, or a name or path that is loaded with `init_kwargs`.

    Vocabularies may differ in size by embeddings that no token has; the loss uses the common part.

    Raises: ValueError without a teacher, for `init_kwargs` with a loaded model, or for a teacher that shares trained weights
    with the student; TypeError for what is no model.
    """
    if teacher is None:
        raise ValueError("teacher_model must be a model, or its name or path, got None. Pass teacher_model.")
    if init_kwargs and not isinstance(teacher, (str, os.PathLike)):
        raise ValueError(
            f"teacher_model_init_kwargs={dict(init_kwargs)!r} needs teacher_model as a name or path, got a "
            f"{type(teacher).__name__} that is loaded already. Load it with these arguments yourself."
        )
    teacher = load_model(teacher, dict(init_kwargs or {}))
    trained = {id(parameter) for parameter in student.parameters() if parameter.requires_grad}
    if any(id(parameter) in trained for parameter in teacher.parameters()):
        raise ValueError(
            "teacher_model and model share weights that train, expected a separate model. Load the teacher a second time."
        )
    found = ModelTeacher(teacher, tokenizer)
    sizes = [embedded_tokens(causal_core(model)) for model in (student, teacher)]
    if min(sizes) < len(tokenizer):
        raise ValueError(
            f"student and teacher have vocabularies of {sizes[0]} and {sizes[1]} tokens, the tokenizer has {len(tokenizer)}: "
            "they do not share it. Use GOLDTrainer for a teacher with another tokenizer."
        )
    if sizes[0] != sizes[1]:
        logger.warning(
            "student and teacher have vocabularies of %d and %d tokens: their first %d are compared.",
            *sizes,
            min(sizes),
        )
    return found
