"""Models, classifiers and tokenizers checked and prepared for a trainer."""

import copy
import inspect
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    set_seed,
)

from trl.data.rendering import text_tokenizer
from trl.models.chat_setup import clone_chat_template
from trl.models.distributed import will_shard
from trl.models.loading import LoadArguments, create_model_from_path
from trl.models.parts import causal_core
from trl.models.peft import is_peft_model
from trl.models.scoring.classifier import head_of

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)

TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")


def load_model(
    model: object, init_kwargs: LoadArguments | None, *, name: str = "model", trained: bool = False
) -> PreTrainedModel:
    """The model itself, or the one of this name or path, loaded with `init_kwargs` (`model_init_kwargs` of a config).

    `trained` as in `create_model_from_path`. Errors call it `name`. Raises: ValueError without a model, or for
    `init_kwargs` with a model that is loaded already; TypeError for what is no model.
    """
    if isinstance(model, (str, os.PathLike)):
        return create_model_from_path(os.fspath(model), trained=trained, **(init_kwargs or {}))
    loaded, core = check_given(model, init_kwargs, name=name)
    has_head = core.can_generate() or core.get_output_embeddings() is not None
    has_own_loss = "labels" in inspect.signature(type(core).forward).parameters
    if not (has_head or (has_own_loss and not hasattr(core, "num_labels"))):
        raise TypeError(f"{name} must be a causal LM, got {type(core).__name__}. Use AutoModelForCausalLM.")
    return loaded


def check_given(
    model: object, init_kwargs: LoadArguments | None, *, name: str = "model"
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model that is loaded already, and the transformers model inside.

    Raises: ValueError without a model, without weights, or for `init_kwargs`; TypeError for what is no model.
    """
    if model is None:
        hint = " Pass it as the first argument." if name == "model" else ""
        raise ValueError(f"{name} must be a name, a path or a model, got None.{hint}")
    core = causal_core(model, name=name)  # type: ignore[arg-type]
    missing = [weight for weight, parameter in core.named_parameters() if parameter.is_meta]
    if missing and not will_shard():  # which fills the weights of a meta model in by itself
        raise ValueError(
            f"{name} lacks {len(missing)} weights ({missing[0]}, ...). Load it without init_empty_weights."
        )
    if init_kwargs:
        raise ValueError("model_init_kwargs needs a model given by name or path, got a loaded one.")
    return model, core  # type: ignore[return-value]


def check_processing_class(processing_class: object) -> None:
    """Raise TypeError for no tokenizer or processor, ValueError for a tokenizer without a vocabulary."""
    if isinstance(processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
        tokenizer = text_tokenizer(processing_class)
        is_tokenizer = isinstance(tokenizer, PreTrainedTokenizerBase)
        if is_tokenizer and len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError(f"the tokenizer of '{tokenizer.name_or_path}' has no vocabulary. Pass one.")
        return
    raise TypeError(f"processing_class must be a tokenizer, got {type(processing_class).__name__}.")


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills padded positions; any will do where the tokenizer has none, because masks go by position."""
    return tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0


def take_chat_template(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | None,
    peft_config: "PeftConfig | None" = None,
) -> "tuple[PreTrainedModel, PeftConfig | None]":
    """Apply `chat_template_path`: a Jinja file, or another tokenizer whose template and added tokens are copied.

    Returns the model, with more embeddings if tokens were added, and the `peft_config`, which then also trains these
    (`trainable_token_indices`). Raises FileNotFoundError if the path is neither.
    """
    if path is None:
        return model, peft_config
    if not Path(path).is_file() and Path(path).suffix in TEMPLATE_FILES:
        raise FileNotFoundError(
            f"chat_template_path={path!r} is no file, seen from {Path.cwd()}. "
            "Give the path of a Jinja file, or a tokenizer."
        )
    if Path(path).is_file():
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        return model, peft_config
    try:
        model, _, added = clone_chat_template(model, tokenizer, path)
    except OSError as error:
        raise FileNotFoundError(
            f"chat_template_path={path!r} must be a Jinja file or a tokenizer ({str(error).splitlines()[0]})."
        ) from error
    if added and getattr(peft_config, "trainable_token_indices", ()) in (None, [], {}):
        peft_config = copy.copy(peft_config)
        # PEFT finds the table by the last part of its name (`embed_tokens`, `wte`, ...).
        table = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is table)
        setattr(peft_config, "trainable_token_indices", {name.rpartition(".")[2]: added})  # noqa: B010
        logger.warning("chat_template_path added %d tokens: they are trained beside the adapter.", len(added))
    elif added and (peft_config is not None or is_peft_model(model)):
        logger.warning(
            "chat_template_path added %d tokens, whose embeddings this adapter does not train. Add them before the "
            "adapter is made, with trainable_token_indices.",
            len(added),
        )
    return model, peft_config


def check_positions(model: nn.Module, lengths: Sequence[int] | np.ndarray, *, dataset_name: str) -> None:
    """Check that sequences of `lengths` tokens (after truncation) fit a model's `max_position_embeddings`.

    Raises ValueError for a model with a table of positions, and warns for one that computes them.
    """
    if (table := table_of_positions(model)) is not None:
        check_table(lengths, table, dataset_name=dataset_name)
        return
    limit = getattr(causal_core(model).config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and np.max(lengths, initial=0) > limit:
        logger.warning("%s", _too_long(lengths, limit, dataset_name))


def check_table(lengths: Sequence[int] | np.ndarray, table: int, *, dataset_name: str) -> None:
    """Raise ValueError for sequences with more tokens than a table of positions has rows."""
    if np.max(lengths, initial=0) > table:
        raise ValueError(_too_long(lengths, table, dataset_name))


def _too_long(lengths: Sequence[int] | np.ndarray, limit: int, dataset_name: str) -> str:
    longer = int((np.asarray(lengths) > limit).sum())
    return (
        f"{dataset_name} dataset: {longer} of {len(lengths)} sequences are longer than the {limit} positions of the "
        f"model (max_position_embeddings), the longest has {int(np.max(lengths))} tokens. Set max_length={limit}, or "
        "less."
    )


def table_of_positions(model: nn.Module) -> int | None:
    """Rows of the model's table of positions (GPT-2, OPT); None where positions are computed (rotary, ALiBi)."""
    has_table = any(
        isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES
        for name, module in model.named_modules()
    )
    limit = getattr(causal_core(model).config.get_text_config(), "max_position_embeddings", None)
    return limit if has_table and isinstance(limit, int) else None


# ---- classifiers


class ClassifierKind(NamedTuple):
    """A kind of classifier: `labels` classes, the model class `auto`, PEFT's task type."""

    auto: type
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
    model: object, init_kwargs: LoadArguments | None, kind: ClassifierKind, *, seed: int, trained: bool = False
) -> PreTrainedModel:
    """The classifier itself, or the one of this name or path; a head that its files lack is drawn from `seed` alone.

    `trained` as in `create_model_from_path`. Raises: ValueError for another number of classes, TypeError for a model of
    another kind, and what `check_given` raises.
    """
    if not isinstance(model, (str, os.PathLike)):
        loaded, core = check_given(model, init_kwargs)
        name, advice = type(core).__name__, f"Load it with {kind.auto.__name__}, num_labels={kind.labels}."
        if head_of(core) is None or kind.unlike in name:
            raise TypeError(f"model is a {name}, expected {kind.words}. {advice}")
        if core.config.num_labels != kind.labels:
            raise ValueError(
                f"model must have num_labels={kind.labels} for {kind.words}, got {core.config.num_labels}. {advice}"
            )
        return loaded
    kwargs = {"num_labels": kind.labels, **(init_kwargs or {})}
    if kwargs["num_labels"] != kind.labels:
        raise ValueError(f"model_init_kwargs must have num_labels={kind.labels}, got {kwargs['num_labels']}.")
    set_seed(seed)
    try:
        return create_model_from_path(os.fspath(model), kind.auto, trained=trained, **kwargs)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"'{model}' has weights of other sizes than its config with num_labels={kind.labels}, as {kind.words} has: "
            "perhaps another head. Give another model, or draw these weights anew: "
            "model_init_kwargs={'ignore_mismatched_sizes': True}."
        ) from error


def take_pad_token(model: nn.Module, tokenizer: PreTrainedTokenizerBase, kind: ClassifierKind) -> None:
    """Set the padding token in the model's config: once saved, its own forward finds the ends of rows by it."""
    core = causal_core(model)
    pad = tokenizer.pad_token_id
    if pad is None:
        return  # the saved model takes one row at a time
    for config in (core.config, core.config.get_text_config()):
        config.pad_token_id = pad
    if kind is REWARD_MODEL and pad == tokenizer.eos_token_id:
        logger.warning(
            "The padding token %r is the end token too, so transformers reads rewards elsewhere. Set pad_token.",
            tokenizer.pad_token,
        )


def adapter_of_classifier(peft_config: "PeftConfig | None", kind: ClassifierKind) -> "PeftConfig | None":
    """The settings of a new adapter, with the task type with which PEFT trains and saves the classification head."""
    if peft_config is None or getattr(peft_config, "task_type", kind.task_type) == kind.task_type:
        return peft_config  # no config: refused later
    if peft_config.task_type is not None:
        logger.warning(
            "peft_config has task_type=%s, which leaves the head out: %r is used.",
            getattr(peft_config.task_type, "value", peft_config.task_type),
            kind.task_type,
        )
    peft_config = copy.copy(peft_config)
    peft_config.task_type = kind.task_type
    return peft_config


def check_trained_head(model: nn.Module) -> None:
    """Warn of an adapter that does not train the classification head: a new head would stay random."""
    head = head_of(causal_core(model))
    if head is not None and not any(parameter.requires_grad for parameter in head.parameters()):
        logger.warning("The adapter leaves the head %s out. Add it to modules_to_save.", type(head).__name__)
