"""A policy made ready for a trainer: model, processing class, adapters and the scoring forward."""

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, set_seed

from trl.checkpoints.progress import date_of_run
from trl.data.rendering import set_run_date
from trl.models.loading import LoadArguments, apply_special_tokens, load_processing_class
from trl.models.packed.sequence_group import SequenceGroup
from trl.models.parts import cast_head_to_float32
from trl.models.peft import is_peft_model, is_quantized, prepare_peft_model, resolve_dtype
from trl.models.residuals import to_bfloat16
from trl.models.scoring.base import ScorerBase
from trl.models.scoring.causal import Scorer
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

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)

MOST = 0.9  # of the weights; below it there is a warning
SAMPLE = 10_000  # weights of a tensor


class Policy(NamedTuple):
    """A trained model, its tokenizer and scorer; `context_length`: its engine's, if that may be below the model's."""

    model: Any  # with or without PEFT's wrapper
    processing_class: PreTrainedTokenizerBase | ProcessorMixin
    tokenizer: PreTrainedTokenizerBase
    scorer: Any  # a `Scorer`, or what replaces one
    context_length: int | None = None


def set_up_policy(
    model: object, args: Any, processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
    peft_config: "PeftConfig | None", *, classifier: ClassifierKind | None = None, trained: bool = True,
    shares_tokens: bool = False,
) -> Policy:  # fmt: skip
    """Load model and tokenizer, set tokens and template, add the adapter, make the scorer; log its fallbacks.

    A model given by name is loaded to train all of its weights, unless there is a `peft_config` or it is not to be
    `trained`. Of the config `args` the fields `model_init_kwargs`, `eos_token`, `pad_token`, `chat_template_path`,
    `disable_dropout`, `cast_lm_head_to_fp32` and, if the trainer `shares_tokens`, `sp_size` are used if there are such.
    With `classifier` the model is one of that kind: its config gets the padding token, an adapter trains its head too.
    """
    init: LoadArguments = args.model_init_kwargs or {}
    keeps_residuals = trained and getattr(args, "weights", None) is not None
    if keeps_residuals and peft_config is None and isinstance(model, (str, os.PathLike)):
        if resolve_dtype(init.get("dtype")) not in ("auto", torch.bfloat16):
            raise ValueError(f"weights={args.weights!r} needs dtype='bfloat16', got {init['dtype']}. Leave it out.")
        init = {**init, "dtype": torch.bfloat16}
    if classifier is None:
        loaded = load_model(model, init, trained=trained and peft_config is None)
    else:
        loaded = load_classifier(model, init, classifier, seed=args.seed, trained=peft_config is None)
    if processing_class is None:
        processing_class = load_processing_class(loaded, trust_remote_code=bool(init.get("trust_remote_code")))
    check_processing_class(processing_class)
    tokenizer = apply_special_tokens(
        processing_class, eos_token=getattr(args, "eos_token", None), pad_token=getattr(args, "pad_token", None)
    )
    template = getattr(args, "chat_template_path", None)
    loaded, peft_config = take_chat_template(loaded, tokenizer, template, peft_config)
    set_run_date(processing_class, date_of_run(args))
    if classifier is not None:
        take_pad_token(loaded, tokenizer, classifier)
        peft_config = adapter_of_classifier(peft_config, classifier)
    if peft_config is not None:
        set_seed(args.seed)  # a new adapter starts from the seed alone; the parent sets it again
    if peft_config is not None or is_peft_model(loaded):
        loaded = prepare_peft_model(loaded, peft_config, args)
        if classifier is not None:
            check_trained_head(loaded)
    has_adapter = is_peft_model(loaded) or getattr(loaded, "_hf_peft_config_loaded", False)
    quantizer = getattr(loaded, "hf_quantizer", None)
    if trained and is_quantized(loaded) and not (has_adapter or getattr(quantizer, "is_qat_trainable", False)):
        raise ValueError(
            "quantised weights (load_in_4bit, load_in_8bit) are not trained, and there is no adapter. Set peft_config, "
            "with commands --use_peft true, or load the model without quantisation."
        )
    if keeps_residuals:
        to_bfloat16(loaded)
    if getattr(args, "disable_dropout", False):
        disable_dropout_in_model(loaded)
    if getattr(args, "cast_lm_head_to_fp32", False):
        cast_head_to_float32(loaded)
    make = language_scorer if classifier is None else ClassificationScorer
    scorer = make(loaded, pad_token_id=pad_token_id(tokenizer))
    scorer.join(sequence_group(args, shares_tokens))
    report_fallbacks(loaded, scorer)
    if trained and not keeps_residuals:
        warn_of_rounding(loaded, args.learning_rate)
    return Policy(loaded, processing_class, tokenizer, scorer)


def sequence_group(args: object, shares_tokens: bool) -> SequenceGroup | None:
    """The processes that share this one's batches; None for `sp_size=1`. Raises: ValueError for other trainers."""
    if (sp_size := getattr(args, "sp_size", 1)) > 1 and not shares_tokens:
        raise ValueError(f"sp_size={sp_size} is not supported by this trainer. Use sp_size=1.")
    return SequenceGroup.of_run(sp_size) if sp_size > 1 else None


def make_scorer(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Scorer:
    """The scoring forward of a causal model or an encoder-decoder."""
    return language_scorer(model, pad_token_id=pad_token_id(tokenizer))


def report_fallbacks(model: nn.Module, scorer: ScorerBase) -> None:
    for fallback in scorer.fallbacks:
        logger.warning("%s: %s.", type(model).__name__, fallback)


def warn_of_rounding(model: nn.Module, learning_rate: float) -> None:
    """Warn of trained weights in 16 bits most of which a step of the size of the learning rate leaves as they are."""
    # DeepSpeed and FSDP hold float32 copies; the adapter of a quantised base begins at 0.
    launched = [os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() for name in ("DEEPSPEED", "FSDP")]
    half = [x for x in model.parameters() if x.requires_grad and x.dtype in (torch.float16, torch.bfloat16)]
    if not half or "true" in launched or is_quantized(model):
        return
    if (share := share_moved(half, learning_rate)) < MOST:
        logger.warning(
            "%s trains weights in %s, of which a step of learning_rate=%g moves %.2g %%: other updates are lost to "
            "rounding. Load it in float32 (dtype='float32'), or set weights='bf16+residual', which keeps what rounding "
            "takes away.",
            type(model).__name__, str(half[0].dtype)[6:], learning_rate, 100 * share,
        )  # fmt: skip


@torch.no_grad()
def share_moved(parameters: Sequence[torch.Tensor], step: float) -> float:
    """The share of weights that adding or subtracting `step` changes in their own dtype; of large tensors a sample."""
    moved = 0.0
    for parameter in parameters:
        some = parameter.detach().flatten()[:: parameter.numel() // SAMPLE + 1].float()
        ends = torch.stack([some + step, some - step]).to(parameter.dtype)
        moved += (ends.float() != some).double().mean().item() * parameter.numel()
    return moved / sum(parameter.numel() for parameter in parameters)


def is_encoder_decoder(core: PreTrainedModel, args: Any) -> bool:
    """Whether the model is an encoder-decoder; warns if `args.max_completion_length` has no effect.

    Raises: ValueError if `args.is_encoder_decoder` differs from the model's config.
    """
    option, in_config = args.is_encoder_decoder, bool(core.config.is_encoder_decoder)
    if option is not None and option != in_config:
        raise ValueError(f"is_encoder_decoder={option} contradicts {type(core).__name__}. Leave it out.")
    if args.max_completion_length is not None and not in_config:
        logger.warning("max_completion_length=%d acts on encoder-decoders. Set max_length.", args.max_completion_length)
    return in_config
