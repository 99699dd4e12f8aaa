"""The parts of a language model that scoring needs, a check that they give its logits, and output heads in float32."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from trl.models.switches import in_eval_mode
from trl.tensors.softmax_rows import LogitRule

logger = logging.getLogger(__name__)

IN_FLOAT32, UNTIED = "computes_in_float32", "head_was_untied"  # attributes that `cast_head_to_float32` sets
_LARGE_LOGIT = 50.0  # beyond the usual soft cap, 30
# What models, their layers and their outputs call their cache: the first (Mamba before transformers 5.24: the second).
CACHE = "cache" if "cache" in {part.name for part in fields(BaseModelOutputWithPast)} else "past_key_values"
CACHE_NAMES = (CACHE, "cache_params")


def causal_core(model: nn.Module, *, name: str = "model") -> PreTrainedModel:
    """The transformers model inside PEFT's wrappers. Raises: TypeError where there is none."""
    core: object = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(core, PreTrainedModel):
        raise TypeError(f"{name} must be a PreTrainedModel or PeftModel, got {type(model).__name__}.")
    return core


def embedded_tokens(model: nn.Module) -> int:
    """The number of rows of the input embedding, also if ZeRO-3 shards it."""
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    return getattr(weight, "ds_shape", weight.shape)[0]


def decoder_of(core: PreTrainedModel) -> nn.Module:
    """The part of a causal model that computes hidden states."""
    if core.config.get_text_config() is not core.config:
        return core.base_model  # with its vision or audio tower
    decoder: nn.Module = core.get_decoder()
    # Llama 4's prefix is not its decoder's name (transformers 5.19-5.23).
    return getattr(core, "model", core) if decoder is core else decoder


def layers_of(core: PreTrainedModel) -> nn.ModuleList | None:
    """The list of the layers of a causal model's decoder; None where it has none of that length."""
    count = getattr(core.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    inside = (core.get_decoder() or core.base_model).children()
    return next((part for part in inside if isinstance(part, nn.ModuleList) and len(part) == count), None)


def check_decoder_only(core: PreTrainedModel) -> None:
    """Raise TypeError for an encoder-decoder: its logits at a position do not predict the next input token."""
    if getattr(core.config, "is_encoder_decoder", False):
        raise TypeError(f"model is a {type(core).__name__}, an encoder-decoder. Use AutoModelForCausalLM.")


def logit_rule(config: PretrainedConfig) -> LogitRule:
    """The function that turns `hidden @ weight.T` into logits, by the config."""
    config = config.get_text_config()
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    divisor = getattr(config, "logits_scaling", None)  # Granite divides
    scale = (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)
    scale *= getattr(config, "lm_head_multiplier", 1.0)  # Falcon-H1
    soft_cap = getattr(config, "logits_soft_cap", None)  # RecurrentGemma's name
    return LogitRule(scale=scale, soft_cap=getattr(config, "final_logit_softcapping", soft_cap))


def prompt_learning_unsupported(model: nn.Module) -> str | None:
    active = getattr(model, "active_peft_config", None)
    if active is not None and getattr(active, "is_prompt_learning", False):
        return "PEFT's prompt learning puts virtual tokens into its own forward"
    if getattr(active, "is_adaption_prompt", False):
        return "PEFT's adaption prompts put virtual tokens into its attention"
    return None


def head_unsupported(core: PreTrainedModel, rule: LogitRule) -> str | None:
    """Why decoder, head and rule do not give this model's logits; None if they do."""
    head = core.get_output_embeddings()
    if head is None or decoder_of(core) in (None, core):
        return "it exposes no decoder and output head"
    return logits_unsupported(core, [decoder_of(core)], head, rule)


def logits_unsupported(
    core: PreTrainedModel, bodies: Sequence[nn.Module], head: nn.Module, rule: LogitRule, *, bias: Tensor | None = None,
    **inputs: Tensor,
) -> str | None:  # fmt: skip
    """The reason why `rule(head(hidden) + bias)` are not this model's logits; None if they are.

    The model's forward is run on three fixed hidden states in place of its `bodies` (decoder, encoder), and its logits,
    or those of the last token, are compared. The states are large, so that a soft cap has an effect.
    """
    if any(parameter.numel() == 0 or parameter.is_meta for parameter in head.parameters()):
        return None  # sharded before it could be looked at (ZeRO-3): its config is trusted
    with torch.no_grad(), in_eval_mode(core), ExitStack() as replaced:
        width = getattr(head, "in_features", None) or core.config.get_text_config().hidden_size
        first = next(head.parameters())
        dtype = first.dtype if first.is_floating_point() else core.dtype
        hidden = torch.sin(torch.arange(3 * width, dtype=torch.float32)).view(1, 3, width)
        hidden = hidden.to(first.device, dtype)
        try:
            hidden = hidden * (_LARGE_LOGIT / head(hidden).abs().max().clamp(min=1e-3)).to(hidden.dtype)
            products = head(hidden[0]).float()
            expected = rule.apply_(products if bias is None else products + bias)
            for body in bodies:
                stand_in = replaced_forward(body, lambda *_, **__: _OnlyHidden(last_hidden_state=hidden))
                replaced.enter_context(stand_in)
            ids = torch.full((1, 3), 1 if getattr(core.config.get_text_config(), "pad_token_id", None) == 0 else 0)
            logits = core(input_ids=ids.to(hidden.device), **inputs).logits[0]
        except Exception as error:  # an unknown forward may raise anything without its decoder
            return f"its forward could not be followed ({type(error).__name__}: {error})"
    expected = expected[-1] if logits.ndim == 1 else expected
    if logits.shape == expected.shape:
        closeness = 2e-2 if logits.dtype.itemsize < 4 else 5e-3  # of bfloat16, and of TF32 products
        if (logits.float() - expected).abs().max() <= closeness * expected.abs().max():
            return None
    return "its logits are not what its output head and config say"


class _OnlyHidden(BaseModelOutputWithPast):
    """A decoder's output of which only the hidden states are there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """A block in which `module.forward` is another function; `module(...)` still runs all hooks."""
    before = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def share_parameters(first: nn.Module, second: nn.Module, *, trained: bool = False) -> bool:
    """Whether two models have a parameter in common; with `trained` one that requires a gradient in `first`."""
    of_first = {id(parameter) for parameter in first.parameters() if parameter.requires_grad or not trained}
    return any(id(parameter) in of_first for parameter in second.parameters())


# ---- an output head in float32 on a model of lower precision


def cast_head_to_float32(model: nn.Module) -> None:
    """Cast a model's output head to float32, in place, and compute its products in float32, also under autocast.

    Copies of the model keep this. A 16-bit head tied to the input embedding is untied, with a warning. Raises
    ValueError for a model without a head.
    """
    core = causal_core(model)
    head = core.get_output_embeddings()
    if head is None:
        raise ValueError(f"cast_lm_head_to_fp32=True needs an output head, {type(core).__name__} has none.")
    tied = {id(parameter) for parameter in core.get_input_embeddings().parameters()}
    half = (torch.float16, torch.bfloat16)
    for part in head.modules():
        if not isinstance(part, nn.Linear) or part.weight.dtype not in (*half, torch.float32):
            continue
        if part.weight.dtype in half and id(part.weight) in tied:
            part.weight = nn.Parameter(part.weight.detach().clone(), part.weight.requires_grad)
            for config in (core.config, core.config.get_text_config()):
                config.tie_word_embeddings = False
            core.all_tied_weights_keys = core.get_expanded_tied_weights_keys(all_submodels=True)
            setattr(core, UNTIED, True)
            logger.warning(
                "cast_lm_head_to_fp32=True unties the output head of %s from the input embedding, which stays in %s.",
                type(core).__name__,
                core.dtype,
            )
        part.float()
        part.register_forward_pre_hook(_in_float32)
        setattr(part, IN_FLOAT32, True)


def _in_float32(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].float(), *inputs[1:])
