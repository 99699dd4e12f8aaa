"""Prefill and decoding with our cache: by a model's own forward, or with our own decode step for models like Llama.

For our step the weights of queries, keys and values, and of gate and up projection, are concatenated once for each call
of the engine, in copies to which LoRA adapters are added. The model is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from trl.generation.transformers.cache import RolloutCache
from trl.generation.transformers.reuse import Held
from trl.generation.transformers.steps import Moves
from trl.models.packed.attention import reach_of
from trl.models.parts import decoder_of, logit_rule
from trl.tensors.heads import without_autocast
from trl.tensors.segments import Segments


class OwnForward:
    """The model's own layers; their attention must be `rollout_attention` on the same cache."""

    def __init__(self, model: PreTrainedModel, cache: RolloutCache) -> None:
        self.cache, self.device = cache, next(model.get_input_embeddings().parameters()).device
        self.decoder: Any = decoder_of(model)
        self.head: Any = model.get_output_embeddings()
        self.rule = logit_rule(model.config)
        self._no_table = torch.zeros(1, 1, 1, 4, dtype=torch.int64, device=self.device)

    def prefill(self, prompts: Sequence[Sequence[int]], held: Sequence[Held | None] = ()) -> Tensor:
        """Run prompts, each without the tokens that are `held`; the logits `(n, V)` after the last token of each."""
        hidden, lengths = self.prompt_states(prompts, held)
        return self.logits(hidden[(lengths.cumsum(0) - 1).to(self.device)])

    def bytes_of_row(self) -> dict[str, int]:
        """Bytes of a row for each token (keys and values) and besides (states, also its prompt's), measured with one
        token in the empty cache.
        """
        self.prompt_states([[0]])
        tokens = sum(part.nbytes for layer in self.cache.layers.values() for part in layer.values())
        states = 0 if self.cache.states is None else self.cache.states.bytes_of_row()
        self.cache.drop_prompts(Moves(torch.tensor([False])))
        return {"token_bytes": tokens, "row_bytes": 2 * states}

    def prompt_states(
        self, prompts: Sequence[Sequence[int]], held: Sequence[Held | None] = ()
    ) -> tuple[Tensor, Tensor]:
        """Hidden states `(N, H)` of prompts, one after another and without what is `held`; their lengths."""
        before = [0 if part is None else part.length for part in held or [None] * len(prompts)]
        parts = [prompt[count:] for prompt, count in zip(prompts, before, strict=True)]
        lengths = list(map(len, parts))
        segments = Segments.from_lengths(lengths)
        ids = torch.tensor([token for part in parts for token in part], device=self.device)
        positions = segments.position_ids()[0] + torch.tensor(before).repeat_interleave(segments.length)
        self.cache.step = None
        self.cache.expect_prompts(lengths, self.device, held)
        return self._hidden(ids, positions.to(self.device), segments.table), segments.length

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run one token `(R,)` of each row at its position, and return logits `(R, V)`."""
        return self.logits(self._hidden(tokens, positions, self._no_table))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `(R, V)` of hidden states `(R, H)`, at least float32, in new memory."""
        products = self.head(hidden)
        return self.rule.apply_(products.to(torch.promote_types(products.dtype, torch.float32)))

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """`mask` must have four dimensions to reach the attention layers unchanged."""
        outputs = self.decoder(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False)
        return outputs.last_hidden_state[0]


FUSED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # angles do not depend on the longest row
LARGEST_COPIED = 6 << 30  # bytes of all weights, most of which are copied
_PACKED_FOR = 64  # rows; as fast for other numbers


def fused_unsupported(model: PreTrainedModel, dtype: torch.dtype | None = None) -> str | None:
    """Why our decode step does not support a model (under autocast in `dtype`); None if it does."""
    config = model.config
    if config.model_type not in FUSED_MODEL_TYPES:
        return f"its architecture ({config.model_type}) is not one of {', '.join(FUSED_MODEL_TYPES)}"
    home = f"transformers.models.{config.model_type}."
    decoder: Any = model.get_decoder()
    layers = decoder.layers
    modules = [[kind.__module__ for kind in type(part).__mro__] for part in (model, decoder, *layers)]
    homes = (next(name for name in names if not name.startswith("torch.distributed.")) for names in modules)
    if not all(name.startswith(home) for name in homes):  # without FSDP2's subclasses
        return "its class is not transformers' own"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_TYPES:
        return f"its rotary embedding ({rope}) depends on the longest row"
    itemsize = (dtype or model.dtype).itemsize
    if sum(parameter.numel() for parameter in model.parameters()) * itemsize > LARGEST_COPIED:
        return "its weights are too large to be copied"
    names = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    linears = [layer.get_submodule(name) for layer in layers for name in names]
    if not all(map(has_readable_weight, [*linears, model.get_output_embeddings()])):
        return "its layers are quantised, or have adapters that are no sums of weights"
    parts: Any = *layers, decoder.norm, model.get_output_embeddings()
    if any(inner._forward_hooks or inner._forward_pre_hooks for part in parts for inner in part.modules()):
        return "its layers have hooks"
    return None


def has_readable_weight(module: nn.Module | None) -> bool:
    """Whether `readable_weight` supports a layer. Its weights may be sharded."""
    base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else module  # type: ignore[operator,union-attr]
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        return False
    if base is module:
        return True
    from peft.tuners.lora import Linear as LoraLinear

    if type(module) is not LoraLinear or getattr(module, "fan_in_fan_out", False):
        return False
    if module.disable_adapters or module.merged:
        return not (module.merged and module.disable_adapters)
    return not any(name in module.lora_variant or module.lora_bias[name] for name in _active(module))


def readable_weight(module: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a layer that `has_readable_weight`, with active LoRA adapters added to a copy."""
    if not hasattr(module, "get_base_layer"):
        return module.weight, module.bias
    base, adapters = module.get_base_layer(), _active(module)
    if module.disable_adapters or module.merged or not adapters:
        return base.weight, base.bias
    weight = base.weight.to(torch.promote_types(base.weight.dtype, torch.float32))
    for name in adapters:
        weight = weight + module.get_delta_weight(name).to(weight.dtype)
    return weight.to(base.weight.dtype), base.bias


def _active(module: Any) -> list[str]:
    return [name for name in module.active_adapters if name in module.lora_A]


class Projection:
    """Linear layers with readable weights and the same input, as one product; `dtype` is that of autocast."""

    def __init__(self, *modules: nn.Module, dtype: torch.dtype | None = None) -> None:
        parts = [readable_weight(module) for module in modules]
        weight = parts[0][0] if len(parts) == 1 else torch.cat([weight for weight, _ in parts])
        bias = None
        if any(term is not None for _, term in parts):
            bias = torch.cat([weight.new_zeros(len(part)) if term is None else term for part, term in parts])
        dtype = dtype or weight.dtype
        self.weight, self.bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        has_layout = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        # oneDNN's layout for float32 on a CPU: with the same precision 2.3 times as fast as MKL on AMD (torch 2.13).
        self.is_packed = has_layout and weight.device.type == "cpu" and self.weight.dtype == torch.float32
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKED_FOR)

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(inputs.float(), self.weight, self.bias, "none", [], "")
        return F.linear(inputs.to(self.weight.dtype), self.weight, self.bias)


class FusedLayer:
    """A decoder layer with concatenated weights."""

    def __init__(self, layer: Any, config: PretrainedConfig, *, dtype: torch.dtype | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = Projection(attention.q_proj, attention.k_proj, attention.v_proj, dtype=dtype)
        self.output = Projection(attention.o_proj, dtype=dtype)
        self.gate_up = Projection(mlp.gate_proj, mlp.up_proj, dtype=dtype)
        self.down = Projection(mlp.down_proj, dtype=dtype)
        self.activation = mlp.act_fn
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.head_size, self.scale = attention.head_dim, attention.scaling
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.reach = reach_of(attention, config.sliding_window if config.model_type == "mistral" else None)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: RolloutCache, number: int) -> Tensor:
        """Hidden states `(R, H)` after attention over the cache and the gated MLP."""
        rows = len(hidden)
        qkv = self.qkv(normalised(self.norms[0], hidden)).view(rows, -1, self.head_size)
        turned, value = qkv.split([self.heads + self.key_heads, self.key_heads], dim=1)
        if self.head_norms[0] is not None:
            query, key = turned.split([self.heads, self.key_heads], dim=1)
            turned = torch.cat([normalised(self.head_norms[0], query), normalised(self.head_norms[1], key)], dim=1)
        turned = (turned * cos + turned.roll(self.head_size // 2, -1) * sin).to(value.dtype)
        query, key = turned.split([self.heads, self.key_heads], dim=1)
        seen = cache.attend(number, query, key, value, scale=self.scale, reach=self.reach)
        hidden = hidden + self.output(seen.reshape(rows, -1))
        gate, up = self.gate_up(normalised(self.norms[1], hidden)).chunk(2, dim=-1)
        return hidden + self.down(self.activation(gate) * up)


def normalised(norm: Any, hidden: Tensor) -> Tensor:
    """RMS norm in float32 in one kernel, equal to the model's own; other modules are called."""
    if not type(norm).__name__.endswith("RMSNorm") or not hasattr(norm, "variance_epsilon"):
        return norm(hidden)
    scaled = F.rms_norm(hidden.float(), (hidden.shape[-1],), eps=norm.variance_epsilon)
    return norm.weight * scaled.to(hidden.dtype)


class FusedDecoder(OwnForward):
    """Prefill with the model's own forward, decoding with concatenated copies of its weights.

    `dtype` is the autocast dtype, None without autocast.
    """

    def __init__(self, model: PreTrainedModel, cache: RolloutCache, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(model, cache)
        self.layers = [FusedLayer(layer, model.config, dtype=dtype) for layer in self.decoder.layers]
        self.embeddings = model.get_input_embeddings()
        self.head = Projection(self.head, dtype=dtype)

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        with without_autocast(tokens.device.type):  # the weights have its dtype already
            hidden = self.embeddings(tokens)
            cos, sin = self.decoder.rotary_emb(hidden, positions[None])
            half = sin.shape[-1] // 2
            sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
            cos, sin = cos[0, :, None], sin[0, :, None]
            for number, layer in enumerate(self.layers):
                hidden = layer(hidden, cos, sin, self.cache, number)
            return self.logits(normalised(self.decoder.norm, hidden))
