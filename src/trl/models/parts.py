"""The parts of a causal language model that scoring needs, and a check that they give its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from trl.models.switches import in_eval_mode
from trl.tensors.softmax_rows import LogitRule

_LARGE_LOGIT = 50.0  # beyond the usual soft cap, 30


def causal_core(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT's wrappers.

    Raises: TypeError where there is none.
    """
    core: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(core, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers PreTrainedModel or a PeftModel around one, got {type(model).__name__}. "
            "Pass a model loaded with AutoModelForCausalLM, or its name or path."
        )
    return core


def embedded_tokens(model: nn.Module) -> int:
    """How many token ids a model embeds: the rows of its input embedding, whole also where ZeRO-3 shards it."""
    weight: Any = model.get_input_embeddings().weight  # type: ignore[operator]
    return getattr(weight, "ds_shape", weight.shape)[0]


def decoder_of(core: PreTrainedModel) -> nn.Module:
    """The part of a causal model that turns its inputs into hidden states."""
    if core.config.get_text_config() is not core.config:
        return core.base_model  # with its vision or audio tower
    return core.get_decoder()


def check_decoder_only(core: PreTrainedModel) -> None:
    """Raise TypeError for an encoder-decoder: its logits at a position do not predict the next input token."""
    if getattr(core.config, "is_encoder_decoder", False):
        raise TypeError(
            f"model is a {type(core).__name__}, an encoder-decoder, expected a decoder alone. Load a causal language "
            "model with AutoModelForCausalLM."
        )


def logit_rule(config: Any) -> LogitRule:
    """What a model does to `hidden @ weight.T` before it calls the result logits, as its config says."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    divisor = getattr(config, "logits_scaling", None)  # Granite divides
    scale = (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)
    return LogitRule(scale=scale, soft_cap=getattr(config, "final_logit_softcapping", None))


def prompt_learning_unsupported(model: nn.Module) -> str | None:
    active = getattr(model, "active_peft_config", None)
    if active is not None and getattr(active, "is_prompt_learning", False):
        return "PEFT's prompt learning puts virtual tokens into its own forward"
    if getattr(active, "is_adaption_prompt", False):
        return "PEFT's adaption prompts put virtual tokens into its attention"
    return None


def head_unsupported(core: PreTrainedModel, rule: LogitRule) -> str | None:
    """The reason why decoder, head and rule do not give this model's logits; None if they do."""
    head = core.get_output_embeddings()
    if head is None or decoder_of(core) in (None, core):
        return "it exposes no decoder and output head"
    return logits_unsupported(core, [decoder_of(core)], head, rule)


def logits_unsupported(
    core: PreTrainedModel,
    bodies: Sequence[nn.Module],
    head: nn.Module,
    rule: LogitRule,
    *,
    bias: Tensor | None = None,
    **inputs: Tensor,
) -> str | None:
    """The reason why `rule(head(hidden) + bias)` are not this model's logits; None if they are.

    The model's forward is run on three fixed hidden states in place of its `bodies` (decoder, encoder): its logits, or those
    of the last token if it returns only these, are compared. The states are large, so that a soft cap has an effect.
    """
    if any(parameter.numel() == 0 or parameter.is_meta for parameter in head.parameters()):
        return None  # sharded before it could be looked at (ZeRO-3): its config is trusted
    with torch.no_grad(), in_eval_mode(core), ExitStack() as replaced:
        width = getattr(head, "in_features", None) or core.config.get_text_config().hidden_size
        first = next(head.parameters())
        dtype = first.dtype if first.is_floating_point() else core.dtype
        hidden: Any = torch.sin(torch.arange(3 * width, dtype=torch.float32)).view(1, 3, width)
        hidden = hidden.to(first.device, dtype)
        try:
            hidden = hidden * (_LARGE_LOGIT / head(hidden).abs().max().clamp(min=1e-3)).to(hidden.dtype)
            products = head(hidden[0]).float()
            expected = rule.apply_(products if bias is None else products + bias)
            for body in bodies:
                stand_in = replaced_forward(body, lambda *_, **__: _OnlyHidden(last_hidden_state=hidden))
                replaced.enter_context(stand_in)
            ids = torch.full((1, 3), 1 if core.config.get_text_config().pad_token_id == 0 else 0)
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
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
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
    own = {id(parameter) for parameter in first.parameters() if parameter.requires_grad or not trained}
    return any(id(parameter) in own for parameter in second.parameters())
