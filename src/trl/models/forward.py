"""The scoring forward: a causal language model's log-probabilities of given tokens, without its logits.

`Scorer` runs a model's decoder and then the scoring primitive of `tensors/logprobs.py` on the scored positions only.
Both run inside the model's own `forward` and the head's own `__call__`, so that the hooks of DDP, FSDP2 and ZeRO-3
fire: parameters are gathered, gradients reduced, exactly as in a plain call. A model that does not expose a decoder
and a head, or whose logits are not what its head and config say, is scored from its own logits instead; the scorer
says so once.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from trl.models.attention import flat_obstacle, use_flat_attention
from trl.models.layout import ModelBatch, ScoredPositions, flat_batch, padded_batch, padded_rows
from trl.tensors.any_head import local_loss_through, token_scores_through
from trl.tensors.local_loss import local_loss
from trl.tensors.logprobs import token_entropies, token_scores
from trl.tensors.reduce import Weighted
from trl.tensors.softmax_rows import LogitRule

logger = logging.getLogger(__name__)

LossOf = Callable[[Tensor, slice], Tensor]
"""(log-probs of a chunk (C,), which scored positions these are) -> each token's weighted loss (C,)."""


class Scored(NamedTuple):
    """What a scoring forward found, for K scored positions in the order of `positions`."""

    positions: ScoredPositions
    logps: Tensor  # (K,), nats; with gradient unless a local loss was asked for
    total: Tensor | None  # scalar with gradient: the sum of the local loss
    entropies: Tensor | None  # (K,), nats
    correct: Tensor | None  # (K,) bool: the model's most likely token was the target
    entropy: Weighted | None  # sum over all real tokens, also those that are not scored
    aux_loss: Tensor | None  # scalar with gradient: the router's load-balancing loss, not weighted


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What to compute beside the log-probabilities.

    `entropy`: of the scored positions, of all real tokens (summed), or not at all. `temperature` divides the logits.
    """

    loss_of: LossOf | None = None
    entropy: Literal["none", "scored", "all"] = "none"
    correct: bool = False
    temperature: float = 1.0


class Scorer:
    """How one model is scored, decided once: layout (flat or padded) and path (head or own logits).

    `flat=None` takes the flat layout wherever the model can; `flat=False` always pads. `fallbacks` holds, in words,
    what the model could not take. The model may be wrapped afterwards (PEFT before, DDP, FSDP2, DeepSpeed after).

    Example:
        >>> scorer = Scorer(model, pad_token_id=tokenizer.pad_token_id)  # doctest: +SKIP
        >>> scorer.score(model, batch).logps  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, *, pad_token_id: int = 0, flat: bool | None = None) -> None:
        self.core = causal_core(model)
        _check_decoder_only(self.core)
        self.pad_token_id = pad_token_id
        self.neftune_alpha: float | None = None
        self.fallbacks: list[str] = []
        self.rule = logit_rule(self.core.config)
        obstacle = _prompt_learning(model) or _head_obstacle(self.core, self.rule)
        self.uses_head = obstacle is None
        if obstacle:
            self.fallbacks.append(f"it is scored from its own logits, because {obstacle}")
        obstacle = "it is scored from its own logits" if not self.uses_head else flat_obstacle(self.core)
        self.flat = flat is not False and obstacle is None
        if flat is not False and obstacle:
            self.fallbacks.append(f"its batches are padded, because {obstacle}")
        self._needs_table = self.flat and use_flat_attention(self.core)

    def score(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> Scored:
        """Score the trained labels of a batch, in either layout, with `model` (the scorer's model, maybe wrapped).

        The returned loss and metrics do not depend on the layout. Call it under autocast where the run uses mixed
        precision.
        """
        options = options or ScoreOptions()
        laid_out = self.lay_out(batch)
        model = self._without_compiler(model)
        if not self.uses_head:
            return self.score_outputs(self.outputs(model, laid_out), laid_out, options)

        def forward(**inputs: Any) -> dict[str, Tensor | None]:
            return self._forward(inputs, laid_out, options)

        with _replaced(self.core, forward):
            found = model(**laid_out.inputs)
        return self._scored(laid_out, found)

    def _without_compiler(self, model: nn.Module) -> nn.Module:
        """The module that `torch.compile` wraps: a stand-in for its forward cannot be traced; said once."""
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        said = "it runs uncompiled (torch_compile has no effect), because the scoring forward stands in for its own"
        if said not in self.fallbacks:
            self.fallbacks.append(said)
            logger.warning("%s: %s.", type(self.core).__name__, said)
        return inner

    def score_with_logits(
        self, model: nn.Module, batch: Mapping[str, Any], options: ScoreOptions | None = None
    ) -> tuple[Scored, Tensor]:
        """The same, and the model's own logits `(B, T, V)` of the padded rows: for those who ask for logits."""
        rows = padded_batch(batch, pad_token_id=self.pad_token_id)
        outputs = self.outputs(model, rows)
        return self.score_outputs(outputs, rows, options or ScoreOptions()), self.row_logits(outputs, rows)

    def outputs(self, model: nn.Module, rows: ModelBatch) -> Any:
        """The model's own outputs for padded rows, with all their logits."""
        with self._embedding_noise(rows):
            return model(**rows.inputs, **_router_inputs(self.core), use_cache=False)

    def row_logits(self, outputs: Any, rows: ModelBatch) -> Tensor:
        """The logits `(B, T, V)` of the rows' own tokens; prompt tuning puts virtual tokens in front."""
        return outputs.logits[:, -rows.inputs["input_ids"].shape[1] :]

    def score_outputs(self, outputs: Any, rows: ModelBatch, options: ScoreOptions) -> Scored:
        """Score padded rows from the model's own outputs."""
        logits = self.row_logits(outputs, rows).flatten(0, 1)
        found = _score_hidden(nn.Identity(), logits, rows, LogitRule(), options)
        found["aux_loss"] = getattr(outputs, "aux_loss", None)
        return self._scored(rows, found)

    def padded_inputs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """A batch of either layout as padded `input_ids`, `attention_mask` and `labels`, each `(B, T)`."""
        return padded_rows(batch, pad_token_id=self.pad_token_id)

    def lay_out(self, batch: Mapping[str, Any]) -> ModelBatch:
        """The batch in the layout that this model takes."""
        if self.flat:
            return flat_batch(batch, with_table=self._needs_table)
        return padded_batch(batch, pad_token_id=self.pad_token_id)

    def _forward(self, inputs: dict[str, Any], batch: ModelBatch, options: ScoreOptions) -> dict[str, Any]:
        """Stands in for the model's own forward: decoder, then the head over chunks of the scored positions."""
        inputs = {
            name: value for name, value in inputs.items() if value is not None and name != "return_dict"
        }
        router = _router_inputs(self.core)
        with self._embedding_noise(batch):
            outputs = decoder_of(self.core)(**inputs, **router, use_cache=False)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        head = self.core.get_output_embeddings()
        assert head is not None
        found = _call_head(head, hidden, batch, self.rule, options)
        if router:
            found["aux_loss"] = _router_loss(self.core, outputs.router_logits, inputs.get("attention_mask"))
        return found

    def _scored(self, batch: ModelBatch, found: dict[str, Any]) -> Scored:
        entropy = None
        if found.get("entropy_total") is not None:
            count = torch.tensor(batch.real_tokens.numel(), device=found["entropy_total"].device)
            entropy = Weighted(found["entropy_total"], count)
        names = ("logps", "total", "entropies", "correct")
        values = {name: found.get(name) for name in names}
        return Scored(batch.scored, entropy=entropy, aux_loss=found.get("aux_loss"), **values)  # type: ignore[arg-type]

    @contextmanager
    def _embedding_noise(self, batch: ModelBatch) -> Iterator[None]:
        """NEFTune (arXiv:2310.05914, eq. 1): uniform noise of size alpha / sqrt(L d), L the sequence's own length."""
        if not self.neftune_alpha or not self.core.training:
            yield
            return
        alpha = self.neftune_alpha

        def add_noise(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
            lengths = batch.sequence_lengths.view(embedded.shape[:-1]).clamp(min=1)
            size = alpha / (lengths * embedded.shape[-1]).sqrt()
            size = torch.where(batch.sequence_lengths.view_as(lengths) > 0, size, 0.0).to(embedded.dtype)
            return embedded + torch.empty_like(embedded).uniform_(-1, 1) * size[..., None]

        handle = self.core.get_input_embeddings().register_forward_hook(add_noise)
        try:
            yield
        finally:
            handle.remove()


# ---- the parts of a model


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


def decoder_of(core: PreTrainedModel) -> nn.Module:
    """The part of a causal model that turns its inputs into hidden states."""
    if core.config.get_text_config() is not core.config:
        return core.base_model  # with its vision or audio tower
    return core.get_decoder()


def _check_decoder_only(core: PreTrainedModel) -> None:
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


def _prompt_learning(model: nn.Module) -> str | None:
    active = getattr(model, "active_peft_config", None)
    if active is not None and getattr(active, "is_prompt_learning", False):
        return "PEFT's prompt learning puts virtual tokens into its own forward"
    return None


def _head_obstacle(core: PreTrainedModel, rule: LogitRule) -> str | None:
    """Why decoder + head + rule are not this model's logits, in words; None where they are.

    The model's own forward is run on three made-up hidden states, with the decoder left out: its logits must be what
    the head and the config's rule give. The states are large, so that a soft cap bends the logits.
    """
    head = core.get_output_embeddings()
    if head is None or decoder_of(core) in (None, core):
        return "it exposes no decoder and output head"
    if any(parameter.numel() == 0 or parameter.is_meta for parameter in head.parameters()):
        return None  # sharded before it could be looked at (ZeRO-3): its config is trusted
    with torch.no_grad(), _eval_mode(core):
        hidden: Any = _made_up_hidden_states(core, head)
        hidden = hidden * (_LARGE_LOGIT / head(hidden).abs().max().clamp(min=1e-3)).to(hidden.dtype)
        expected = rule.apply_(head(hidden).float())
        try:
            with _replaced(decoder_of(core), lambda *_, **__: _OnlyHidden(last_hidden_state=hidden)):
                logits = core(input_ids=torch.zeros(1, 3, dtype=torch.int64, device=hidden.device)).logits
        except (
            Exception
        ) as error:  # whatever an unknown forward raises without its decoder: it is not understood
            return f"its forward could not be followed ({type(error).__name__}: {error})"
    if logits.shape == expected.shape:
        closeness = 2e-2 if logits.dtype.itemsize < 4 else 5e-3  # of bfloat16, and of TF32 products
        if (logits.float() - expected).abs().max() <= closeness * expected.abs().max():
            return None
    return "its logits are not what its output head and config say"


_LARGE_LOGIT = 50.0  # beyond the usual soft cap, 30


class _OnlyHidden(BaseModelOutputWithPast):
    """A decoder's output of which only the hidden states are there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _made_up_hidden_states(core: PreTrainedModel, head: nn.Module) -> Tensor:
    """Three fixed hidden states `(1, 3, H)` of the head's own width; no random stream is touched."""
    width = getattr(head, "in_features", None) or core.config.get_text_config().hidden_size
    first = next(head.parameters())
    dtype = first.dtype if first.is_floating_point() else core.dtype
    return torch.sin(torch.arange(3 * width, dtype=torch.float32)).view(1, 3, width).to(first.device, dtype)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let `module.forward` be another function for a while, so that `module(...)` still runs all hooks."""
    before = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


# ---- the head


def _call_head(
    head: nn.Module, hidden: Tensor, batch: ModelBatch, rule: LogitRule, options: ScoreOptions
) -> dict[str, Any]:
    """Run the scoring primitive as the head's own forward: `hidden (tokens, H)`."""
    plain = _plain_linear(head)
    if plain is None:
        return _score_hidden(head, hidden, batch, rule, options)
    with _replaced(plain, lambda states: _score_hidden(plain, states, batch, rule, options)):
        return plain(hidden)


def _plain_linear(head: nn.Module) -> nn.Linear | None:
    """The head as a plain linear layer, if that is what it is (also one that PEFT trains as a whole)."""
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        enabled = not head.disable_adapters and head.active_adapter in head.modules_to_save  # type: ignore[operator]
        head = head.modules_to_save[head.active_adapter] if enabled else head.original_module  # type: ignore[index,assignment]
    is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    return head if is_linear else None  # type: ignore[return-value]


def _score_hidden(
    head: nn.Module, hidden: Tensor, batch: ModelBatch, rule: LogitRule, options: ScoreOptions
) -> dict[str, Any]:
    """Log-probs (or a local loss) of the scored positions, and entropies of the others where all are asked for.

    The fast path for a head that is one weight and one bias; any other module is called chunk by chunk.
    """
    rule = replace(rule, temperature=options.temperature)
    states, targets = hidden[batch.scored.source], batch.scored.target
    wants: dict[str, Any] = {"rule": rule, "entropy": options.entropy != "none", "correct": options.correct}
    linear = _plain_linear(head)
    if options.loss_of is None:
        if linear is not None:
            scores = token_scores(states, linear.weight, targets, bias=linear.bias, **wants)
        else:
            scores = token_scores_through(head, states, targets, **wants)
        found = {**scores._asdict(), "total": None}
    else:
        if linear is not None:
            loss = local_loss(states, linear.weight, targets, options.loss_of, bias=linear.bias, **wants)
        else:
            loss = local_loss_through(head, states, targets, options.loss_of, **wants)
        found = {**loss.scores._asdict(), "total": loss.total}
    if options.entropy == "all":
        found["entropy_total"] = _entropy_of_all(head, hidden, batch, rule, found["entropies"])
    return found


@torch.no_grad()
def _entropy_of_all(
    head: nn.Module, hidden: Tensor, batch: ModelBatch, rule: LogitRule, scored: Tensor
) -> Tensor:
    """Sum of the entropies of all real tokens; those of the scored positions are known already."""
    unscored = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)
    unscored[batch.real_tokens] = True
    unscored[batch.scored.source] = False
    states, linear = hidden[unscored.nonzero()[:, 0]], _plain_linear(head)
    if linear is not None:
        rest = token_entropies(states, linear.weight, bias=linear.bias, rule=rule)
    else:
        nowhere = torch.zeros(len(states), dtype=torch.int64, device=hidden.device)
        rest = token_scores_through(head, states, nowhere, rule=rule, entropy=True).entropies
        assert rest is not None
    return scored.sum() + rest.sum()


# ---- mixtures of experts


def _router_inputs(core: PreTrainedModel) -> dict[str, bool]:
    """The argument that makes a mixture of experts return its router's logits, where its config asks for them."""
    if not getattr(core.config.get_text_config(), "output_router_logits", False):
        return {}
    accepts = inspect.signature(type(core).forward).parameters
    return {"output_router_logits": True} if "output_router_logits" in accepts else {}


def _router_loss(core: PreTrainedModel, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """The load-balancing loss of the model's own module (Switch Transformers, arXiv:2101.03961, eq. 4-6).

    A flat row has no padding, so it needs no mask.
    """
    balance = vars(sys.modules[type(core).__module__])["load_balancing_loss_func"]
    mask = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
    config = core.config.get_text_config()
    experts = next(
        value for name in ("num_experts", "num_local_experts") if (value := getattr(config, name, None))
    )
    loss = balance(router_logits, experts, config.num_experts_per_tok, mask)
    assert isinstance(loss, Tensor) and math.prod(loss.shape) == 1
    return loss.reshape(())
