"""A model and its tokenizer made ready for a trainer, from what a user hands in."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trl.models.chat_setup import clone_chat_template
from trl.models.loading import create_model_from_path

logger = logging.getLogger(__name__)

TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")


def load_model(model: Any, init_kwargs: dict[str, Any] | None) -> Any:
    """The model itself, or the one of this name or path, loaded with `init_kwargs` (`model_init_kwargs` of a config).

    Raises: ValueError without a model, or for `init_kwargs` with a model that is loaded already.
    """
    if isinstance(model, str):
        return create_model_from_path(model, **(init_kwargs or {}))
    if model is None:
        raise ValueError("model must be a name, a path or a model, got None. Pass it as the first argument.")
    if init_kwargs:
        raise ValueError(
            f"model_init_kwargs={init_kwargs!r} was given with a model that is loaded already. Load it with these "
            "arguments yourself, or pass its name or path."
        )
    return model


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills padded positions; any will do where the tokenizer has none, because masks go by position."""
    return tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0


def take_chat_template(
    model: Any, tokenizer: PreTrainedTokenizerBase, path: str | None, peft_config: Any = None
) -> Any:
    """Take over the template of `chat_template_path`: a Jinja file, or another tokenizer with the tokens it adds.

    Returns the model, its embeddings grown where tokens were added; with a `peft_config` the new embeddings are
    trained beside the adapter (`trainable_token_indices`).
    """
    if path is None:
        return model
    if Path(path).suffix in TEMPLATE_FILES:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"chat_template_path={path!r}: there is no such file. Give a Jinja file's path."
            )
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        return model
    model, _, added = clone_chat_template(model, tokenizer, path)
    if added and hasattr(peft_config, "trainable_token_indices") and not peft_config.trainable_token_indices:
        peft_config.trainable_token_indices = {"embed_tokens": added}
        logger.warning("chat_template_path added %d tokens: they are trained beside the adapter.", len(added))
    return model
