"""Classifiers made ready for a trainer: a head of the right width, a padding token, an adapter that trains the head."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any, NamedTuple

from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from trl.models.loading import create_model_from_path
from trl.models.parts import causal_core
from trl.models.scoring.classifier import head_of
from trl.models.setup import check_given

logger = logging.getLogger(__name__)


class ClassifierKind(NamedTuple):
    """What a trainer wants of a classifier: `labels` classes under the model class `auto`, PEFT's name of the task."""

    auto: Any
    labels: int
    task_type: str
    words: str
    unlike: str  # part of the class names of models that give logits of another kind


REWARD_MODEL = ClassifierKind(
    AutoModelForSequenceClassification, 1, "SEQ_CLS", "a reward model", "ForTokenClassification"
)
STEP_CLASSIFIER = ClassifierKind(
    AutoModelForTokenClassification, 2, "TOKEN_CLS", "a classifier of steps", "ForSequenceClassification"
)


def load_classifier(
    model: Any, init_kwargs: dict[str, Any] | None, kind: ClassifierKind, *, seed: int
) -> Any:
    """The classifier itself, or the one of this name or path; a head that its files lack is drawn from `seed` alone.

    Raises: ValueError for another number of classes, TypeError for a model of another kind, and what `check_given` raises.
    """
    if not isinstance(model, (str, os.PathLike)):
        _check_kind(check_given(model, init_kwargs), kind)
        return model
    kwargs = {"num_labels": kind.labels, **(init_kwargs or {})}
    if kwargs["num_labels"] != kind.labels:
        raise ValueError(
            f"model_init_kwargs has num_labels={kwargs['num_labels']}, {kind.words} has {kind.labels}. Leave it out."
        )
    set_seed(seed)
    return create_model_from_path(os.fspath(model), kind.auto, **kwargs)


def _check_kind(core: PreTrainedModel, kind: ClassifierKind) -> None:
    name, advice = type(core).__name__, f"Load it with {kind.auto.__name__}, num_labels={kind.labels}."
    if head_of(core) is None or kind.unlike in name:
        raise TypeError(f"model is a {name}, expected {kind.words}. {advice}")
    if core.config.num_labels != kind.labels:
        raise ValueError(
            f"model has num_labels={core.config.num_labels}, expected {kind.labels} for {kind.words}. {advice}"
        )


def take_pad_token(model: Any, tokenizer: PreTrainedTokenizerBase, kind: ClassifierKind) -> None:
    """Tell the model's config which token is padding: its own forward finds the ends of padded rows by it.

    What is trained goes by position; the config is what the saved model is used with.
    """
    core = causal_core(model)
    pad = tokenizer.pad_token_id
    if pad is None:
        logger.warning(
            "The tokenizer has no padding and no end-of-sequence token, so %s does not know padding and takes one row "
            "at a time once it is saved. Set pad_token.",
            type(core).__name__,
        )
        return
    for config in (core.config, core.config.get_text_config()):
        config.pad_token_id = pad
    if kind is REWARD_MODEL and pad == tokenizer.eos_token_id:
        logger.warning(
            "The padding token %r is the end-of-sequence token too. Rewards are trained at the last token of a sequence, "
            "and transformers' own forward will read them at the last one that is not %r. Set pad_token to another "
            "token of the vocabulary.",
            tokenizer.pad_token,
            tokenizer.pad_token,
        )


def adapter_of_classifier(peft_config: Any, kind: ClassifierKind) -> Any:
    """The settings of a new adapter, of the task with which PEFT trains and saves the classification head too."""
    if peft_config is None or peft_config.task_type == kind.task_type:
        return peft_config
    if peft_config.task_type is not None:
        logger.warning(
            "peft_config has task_type=%s, with which the classification head would be neither trained nor saved: %s is "
            "used. Set task_type=%r.",
            getattr(peft_config.task_type, "value", peft_config.task_type),
            kind.task_type,
            kind.task_type,
        )
    peft_config = copy.copy(peft_config)
    peft_config.task_type = kind.task_type
    return peft_config


def check_trained_head(model: Any) -> None:
    """Warn of an adapter that leaves the classification head as it is: a new head would stay random."""
    head = head_of(causal_core(model))
    if head is not None and not any(parameter.requires_grad for parameter in head.parameters()):
        logger.warning(
            "The adapter leaves the classification head %s untrained, and does not save it. Unless the head was "
            "trained before, add its name to modules_to_save.",
            type(head).__name__,
        )
