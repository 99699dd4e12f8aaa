"""A policy made ready for a trainer: model, processing class, adapters and the scoring forward."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, ProcessorMixin, set_seed

from trl.models.loading import apply_special_tokens, load_processing_class
from trl.models.parts import cast_head_to_float32
from trl.models.peft import is_peft_model, prepare_peft_model
from trl.models.scoring.classifier import ClassificationScorer
from trl.models.scoring.encoder_decoder import language_scorer
from trl.models.setup import (
    ClassifierKind,
    adapter_of_classifier,
    check_processing_class,
    check_trained_head,
    load_classifier,
    load_model,
    pad_token_id,
    take_chat_template,
    take_pad_token,
)
from trl.models.switches import disable_dropout_in_model

logger = logging.getLogger(__name__)


class Policy(NamedTuple):
    """A trained model with its tokenizer and scorer. `context_length`: that of its engine, if it may be below the model's."""

    model: Any
    processing_class: PreTrainedTokenizerBase | ProcessorMixin
    tokenizer: PreTrainedTokenizerBase
    scorer: Any
    context_length: int | None = None


def set_up_policy(
    model: Any,
    args: Any,
    processing_class: Any,
    peft_config: Any,
    *,
    classifier: ClassifierKind | None = None,
) -> Policy:
    """Load the model and tokenizer, set tokens and template, add the adapter, make the scorer; log the scorer's fallbacks.

    `args` is a training config; its fields `model_init_kwargs`, `eos_token`, `pad_token`, `chat_template_path`,
    `disable_dropout` and `cast_lm_head_to_fp32` are used if it has them. With `classifier` the model is one of that kind: its
    config gets the padding token, and an adapter trains its head too.

    Raises: what `load_model`, `load_classifier`, `check_processing_class` and `prepare_peft_model` raise.
    """
    init: Any = args.model_init_kwargs or {}
    if classifier is None:
        loaded = load_model(model, init)
    else:
        loaded = load_classifier(model, init, classifier, seed=args.seed)
    if processing_class is None:
        trusts = bool(init.get("trust_remote_code", False))
        processing_class = load_processing_class(loaded, trust_remote_code=trusts)
    check_processing_class(processing_class)
    tokenizer = apply_special_tokens(
        processing_class,
        eos_token=getattr(args, "eos_token", None),
        pad_token=getattr(args, "pad_token", None),
    )
    template = getattr(args, "chat_template_path", None)
    loaded, peft_config = take_chat_template(loaded, tokenizer, template, peft_config)
    if classifier is not None:
        take_pad_token(loaded, tokenizer, classifier)
        peft_config = adapter_of_classifier(peft_config, classifier)
    if peft_config is not None:
        set_seed(args.seed)  # a new adapter starts from the seed alone; the parent sets it again
    if peft_config is not None or is_peft_model(loaded):
        loaded = prepare_peft_model(loaded, peft_config, args)
        if classifier is not None:
            check_trained_head(loaded)
    if getattr(args, "disable_dropout", False):
        disable_dropout_in_model(loaded)
    if getattr(args, "cast_lm_head_to_fp32", False):
        cast_head_to_float32(loaded)
    if classifier is None:
        scorer = make_scorer(loaded, tokenizer)
    else:
        scorer = ClassificationScorer(loaded, pad_token_id=pad_token_id(tokenizer))
    report_fallbacks(loaded, scorer)
    return Policy(loaded, processing_class, tokenizer, scorer)


def make_scorer(model: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The scoring forward of a causal model or an encoder-decoder."""
    return language_scorer(model, pad_token_id=pad_token_id(tokenizer))


def report_fallbacks(model: Any, scorer: Any) -> None:
    """Log a scorer's fallbacks."""
    for fallback in scorer.fallbacks:
        logger.warning("%s: %s.", type(model).__name__, fallback)


def is_encoder_decoder(core: Any, args: Any) -> bool:
    """Whether the model is an encoder-decoder; warns if `args.max_completion_length` has no effect.

    Raises: ValueError if `args.is_encoder_decoder` differs from the model's config.
    """
    said, found = args.is_encoder_decoder, bool(core.config.is_encoder_decoder)
    if said is not None and said != found:
        raise ValueError(f"is_encoder_decoder={said} contradicts {type(core).__name__}. Leave it out.")
    if args.max_completion_length is not None and not found:
        logger.warning(
            "max_completion_length=%d acts on encoder-decoders only. Set max_length.",
            args.max_completion_length,
        )
    return found
