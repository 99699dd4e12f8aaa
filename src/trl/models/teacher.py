"""Teachers of distillation behind one interface: `teacher.divergence(scorer, model, batch, loss)`.

`make_teacher` chooses once between a separate model and the student's base with its adapter disabled; answers in the batch's
columns are `ColumnTeacher`'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trl.models.packed.layout import TEACHER_BATCH, TEACHER_IDS, TEACHER_LOGPS
from trl.models.parts import causal_core, embedded_tokens, share_parameters
from trl.models.peft import is_peft_model
from trl.models.policy import make_scorer
from trl.models.reference import AdapterReference, FrozenModel, Reference
from trl.models.scoring.causal import OwnStates, Scorer
from trl.models.setup import load_model
from trl.objectives.distillation import TeacherLoss
from trl.tensors.vocabulary_loss import Losses, LossOfLogits, VocabularyLoss

logger = logging.getLogger(__name__)


class Teacher(Protocol):
    """Next-token distributions that a student learns.

    A kind of teacher says what `over_chunks` reads beside the student (`reads`), and which form of a loss takes it.
    """

    model: Any = None
    """A model of its own, which can also generate; None where there is none."""

    def prepare(self, accelerator: Accelerator) -> None:
        """Move a separate model to the device, or shard it like the student."""

    def reads(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `over_chunks` beside the student `model`."""
        return {}

    def loss_of(self, loss: TeacherLoss, batch: Mapping[str, Any]) -> LossOfLogits:
        """The loss of a chunk of logits."""
        return lambda logits, others, _: loss.of_logits(logits, others)

    def divergence(
        self,
        scorer: Scorer,
        model: nn.Module,
        batch: Mapping[str, Any],
        loss: TeacherLoss,
        *,
        temperature: float = 1.0,
        weights: Tensor | None = None,
    ) -> VocabularyLoss:
        """The sum of `loss` over the scored positions of `batch`, with gradient for the student `model`, chunk by chunk.

        `scorer` is the student's; `model` may be wrapped. `temperature` divides the logits of both, `weights` `(K,)` multiply
        the losses. Teachers that are models read the batch's `teacher_batch` where it has one: other prompts with the same
        completions in the same order. Call it under autocast where the run uses mixed precision.
        """
        loss_of, reads = self.loss_of(loss, batch), self.reads(model, batch)
        if weights is not None:
            loss_of = _weighted(loss_of, weights)
        return scorer.over_chunks(model, batch, loss_of, temperature=temperature, **reads)


class FrozenTeacher(Teacher):
    """A separate model."""

    def __init__(self, reference: FrozenModel) -> None:
        self.reference = reference

    @property
    def model(self) -> Any:  # type: ignore[override]
        return self.reference.model

    def prepare(self, accelerator: Accelerator) -> None:
        self.reference.prepare(accelerator)

    def reads(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        other = (self.reference.scorer, self.reference.model)
        return {"other": other, "other_batch": batch.get(TEACHER_BATCH)}


class SelfTeacher(Teacher):
    """The student itself (`InitialPolicy`, live) or its base (`AdapterReference`).

    Its hidden states are computed first, without gradient, then read through the head in the student's pass.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    def reads(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        shown = batch.get(TEACHER_BATCH, batch)
        states = self.reference.score(model, shown, lambda own, inner, rows: own.scored_states(inner, rows))
        return {"other": OwnStates(states, base=isinstance(self.reference, AdapterReference))}


class ColumnTeacher(Teacher):
    """Answers in the batch: `teacher_ids` and `teacher_logps` `(K, k)`, in the order of the scored positions.

    They are the teacher's k most likely tokens and their log-probs under its whole distribution, at the temperature of the
    loss.
    """

    def loss_of(self, loss: TeacherLoss, batch: Mapping[str, Any]) -> LossOfLogits:
        ids, logps = batch[TEACHER_IDS], batch[TEACHER_LOGPS]
        return lambda logits, _, rows: loss.of_top_k(logits, ids[rows], logps[rows])


def _weighted(loss_of: LossOfLogits, weights: Tensor) -> LossOfLogits:
    """The losses times `weights`; statistics beside them stay as they are."""

    def weighted(logits: Tensor, others: Any, rows: slice) -> Losses:
        found = loss_of(logits, others, rows)
        if isinstance(found, tuple):
            return found[0] * weights[rows], found[1]
        return found * weights[rows]

    return weighted


def make_teacher(
    teacher: Any,
    init_kwargs: Mapping[str, Any] | None,
    student: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    scorer: Any = None,
) -> Teacher:
    """The teacher of `student`: a model, or a name or path that is loaded with `init_kwargs`; None: the base of a `PeftModel`.

    Vocabularies may differ in size by embeddings that no token has; the loss uses the common part. `scorer` is the student's.

    Raises: ValueError without a teacher, for `init_kwargs` with a loaded model, or for a teacher that shares trained weights
    with the student; TypeError for what is no model.
    """
    if init_kwargs and not isinstance(teacher, (str, os.PathLike)):
        given = "none" if teacher is None else f"a {type(teacher).__name__} that is loaded already"
        raise ValueError(
            f"teacher_model_init_kwargs={dict(init_kwargs)!r} needs teacher_model as a name or path, got {given}."
        )
    if teacher is None:
        if scorer is None or not is_peft_model(student):
            raise ValueError(
                "teacher_model must be a model, or its name or path, got None. Pass teacher_model, or train an adapter, whose "
                "base is then the teacher."
            )
        return SelfTeacher(AdapterReference(scorer))
    teacher = load_model(teacher, dict(init_kwargs or {}))
    if share_parameters(student, teacher, trained=True):
        raise ValueError(
            "teacher_model and model share weights that train, expected a separate model. Load the teacher a second time."
        )
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
    return FrozenTeacher(FrozenModel(teacher, make_scorer(teacher, tokenizer)))
