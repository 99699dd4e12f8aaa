"""The teacher of distillation: a frozen model with the student's tokenizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from trl.models.parts import causal_core, embedded_tokens, share_parameters
from trl.models.policy import make_scorer
from trl.models.reference import FrozenModel
from trl.models.setup import load_model

logger = logging.getLogger(__name__)


def make_teacher(
    teacher: Any,
    init_kwargs: Mapping[str, Any] | None,
    student: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
) -> FrozenModel:
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
    return FrozenModel(teacher, make_scorer(teacher, tokenizer))
