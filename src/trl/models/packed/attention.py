"""Attention over a packed row of segments, registered with transformers' attention interface.

The row has real tokens only. Its segments are passed as the attention mask: an int64 table `(1, 1, S, 4)`
(`Segments.to_table`), which transformers gives to every attention layer unchanged, also in gradient checkpointing. Each
segment attends to its prefix and itself in one call of PyTorch's kernel: no mask as large as the row, no padding, no
prompt computed twice. Calls without a table (generation, padded rows) use transformers' SDPA.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from trl.tensors.segments import Segments

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "trl_packed"

# Decoders in which tokens interact through this attention alone, so that a packed row gives the logits of padded rows
# (tests/models/packed/test_attention.py: to 1e-12 in float64, mixtures of experts to 1e-5 in float32).
PACKED_MODEL_TYPES = frozenset([
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "cohere", "olmo2", "granite",
    "gpt2", "gpt_neox", "opt", "mixtral", "qwen2_moe", "qwen3_moe",
])  # fmt: skip
# Attention whose window or cap the implementation the user chose handles itself, over position_ids.
FLASH_ATTENTION_VARIANTS = {
    "flash_attention_2",
    "flash_attention_3",
    "kernels-community/flash-attn2",
    "kernels-community/flash-attn3",
    "kernels-community/vllm-flash-attn3",
}
VARIABLE_LENGTH_IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3", "kernels-community/")


class _Call(NamedTuple):
    """One kernel call: the row's next `length` queries over their own keys and the first `prompt` of call `prefix`."""

    length: int
    prefix: int
    prompt: int


class _Bounds(NamedTuple):
    """Where segments begin and end, for the variable-length kernel; `gather` are the keys, prompts once per branch."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    gather: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The kernel calls of a segment table, computed once per table.

    A prompt and the branch directly after it are one plain sequence and share a call.
    """

    segments: Segments
    calls: tuple[_Call, ...]
    masks: dict[tuple[int, int, int | None, torch.dtype], Tensor]  # those of the calls, for all layers
    bounds: list[_Bounds]  # of the variable-length kernel, once they are known

    @classmethod
    def of(cls, table: Tensor) -> _Plan:
        plan = _PLANS.get(table)
        if plan is not None:
            return plan
        segments, calls = Segments.from_table(table), list[_Call]()
        prefixes: dict[int, int] = {}  # start of a plain segment -> its call
        for start, length, prefix_start, prefix in segments:
            if prefix and prefix_start + prefix == start:
                calls[-1] = calls[-1]._replace(length=prefix + length)
            elif prefix:
                calls.append(_Call(length, prefixes[prefix_start], prefix))
            else:
                prefixes[start] = len(calls)
                calls.append(_Call(length, len(calls), 0))
        plan = _PLANS[table] = cls(segments, tuple(calls), {}, [])
        return plan

    def mask(self, length: int, seen: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The mask of the last `length` of `seen` tokens, for all layers: bool, or 0 and -inf in a floating dtype."""
        key = (length, seen, window, dtype)
        if key not in self.masks:
            mask = _causal_mask(length, seen, window, device)
            if dtype != torch.bool:  # the kernel would convert it once per layer, and keep it for backward
                mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, -torch.inf)
            self.masks[key] = mask
        return self.masks[key]


_PLANS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    held: Sequence[tuple[Tensor, Tensor] | None] = (), **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of every segment over (its prompt | itself): `query (1, heads, N, D) -> (1, N, heads, D)`.

    Plain segments may have keys and values `(heads, tokens, D)` of earlier tokens, which are `held`. Without a segment
    table this is transformers' SDPA, written out with a soft cap (Gemma 2).
    """
    mask = attention_mask
    if mask is None or mask.dtype != torch.int64 or mask.ndim != 4 or mask.shape[-1] != 4:
        if softcap is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling,
                sliding_window=sliding_window, **kwargs,
            )  # fmt: skip
        key, value = (repeat_kv(part, query.shape[1] // part.shape[1]) for part in (key, value))
        capped = _soft_capped(query, key, value, attention_mask, dropout, scaling, softcap)
        return capped.transpose(1, 2).contiguous(), None

    plan = _Plan.of(mask)
    # Qwen2-MoE keeps its window on the module and builds it into the mask alone (transformers 5.19).
    window: int | None = sliding_window or getattr(module, "sliding_window", None)
    before = held or [None] * len(plan.calls)
    longest = max((pair[0].shape[1] for pair in before if pair is not None), default=0)
    if window and longest + max(call.prompt + call.length for call in plan.calls) <= window:
        window = None  # no segment is long enough to meet it
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)  # rotary embeddings leave queries and keys in float32
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    plain = not longest and dropout == 0.0 and softcap is None and query.shape[-1] <= 256
    if plain and query.is_cuda and query.dtype.itemsize == 2 and (kernel := _variable_length_kernel()) is not None:
        return _variable_length(kernel, query, key, value, plan, scaling, window), None
    groups, repeats = query.shape[1] // key.shape[1], 1
    if groups > 1 and (softcap is not None or device != "cpu"):
        # On a CPU SDPA shares key heads itself, 10 % faster; other devices would leave their fast kernels for it.
        key, value, repeats = repeat_kv(key, groups), repeat_kv(value, groups), groups
    lengths = [call.length for call in plan.calls]
    queries, keys, values = (part.split(lengths, dim=2) for part in (query, key, value))
    outputs = []
    for call, earlier, q, k, v in zip(plan.calls, before, queries, keys, values, strict=True):
        if earlier is not None:
            k, v = (
                torch.cat([repeat_kv(part[None], repeats), newer], dim=2)
                for part, newer in zip(earlier, (k, v), strict=True)
            )
        if call.prompt:
            k = torch.cat([keys[call.prefix][:, :, : call.prompt], k], dim=2)
            v = torch.cat([values[call.prefix][:, :, : call.prompt], v], dim=2)
        outputs.append(_one_call(plan, q, k, v, dropout, scaling, window, softcap).transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def _one_call(
    plan: _Plan, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None,
    window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Causal attention of the last `T` of `K` keys' tokens: `(1, heads, T, D)` over `(1, heads, K, D)`."""
    length, seen = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if softcap is None and length in (1, seen) and (window is None or seen <= window):
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, is_causal=length > 1, enable_gqa=grouped
        )
    mask = plan.mask(length, seen, window, query.dtype if softcap is None else torch.bool, query.device)
    if softcap is not None:
        return _soft_capped(query, key, value, mask, dropout, scaling, softcap)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )


def _causal_mask(length: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """Bool `(1, 1, length, seen)`, True where a query sees a key; the last query sees the last key."""
    query = torch.arange(seen - length, seen, device=device)[:, None]
    key = torch.arange(seen, device=device)[None]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    return mask[None, None]


def _soft_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None,
    softcap: float,
) -> Tensor:  # fmt: skip
    """Attention whose scores are `cap * tanh(score / cap)` (Gemma 2, arXiv:2408.00118, section 2)."""
    scale: float = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    if mask is None:
        mask = _causal_mask(query.shape[2], key.shape[2], None, query.device)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return F.dropout(weights.to(query.dtype), dropout) @ value


# ---- one kernel for all segments on a GPU


@cache
def _variable_length_kernel() -> Callable[..., object] | None:
    """PyTorch's variable-length attention with windows and grouped heads (later than 2.10), or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"window_size", "enable_gqa"} <= known.keys() else None


def _variable_length(
    kernel: Callable[..., object], query: Tensor, key: Tensor, value: Tensor, plan: _Plan, scaling: float | None,
    window: int | None,
) -> Tensor:  # fmt: skip
    """PyTorch's variable-length flash attention; keys of a prompt are gathered once per branch."""
    if not plan.bounds:
        plan.bounds.append(_variable_length_bounds(plan.segments, query.device))
    bounds = plan.bounds[0]
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    if bounds.gather is not None:
        key, value = key[bounds.gather], value[bounds.gather]
    output = kernel(
        query.contiguous(), key.contiguous(), value.contiguous(), bounds.queries, bounds.keys,
        bounds.longest_query, bounds.longest_key, scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        window_size=(-1 if window is None else window - 1, 0),
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output[None]


def _variable_length_bounds(segments: Segments, device: torch.device) -> _Bounds:
    lengths = torch.tensor(segments.length)
    seen = lengths + torch.tensor(segments.prefix_length)
    gather = None
    if segments.has_shared_prefixes:
        spans = []
        for start, length, prefix_start, prefix_length in segments:
            spans.append(torch.arange(prefix_start, prefix_start + prefix_length))
            spans.append(torch.arange(start, start + length))
        gather = torch.cat(spans).to(device)
    queries, keys = (F.pad(counts.cumsum(0), (1, 0)).to(device, torch.int32) for counts in (lengths, seen))
    return _Bounds(queries, keys, int(lengths.max()), int(seen.max()), gather)


# ---- which models take it


def packed_unsupported(model: PreTrainedModel) -> str | None:
    """The reason why this model does not support packed rows; None if it does."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if config.model_type not in PACKED_MODEL_TYPES:
        known = ", ".join(sorted(PACKED_MODEL_TYPES))
        return f"its architecture ({config.model_type}) is not among those checked: {known}"
    if is_bidirectional(model):
        return "its attention is bidirectional"
    implementation = config._attn_implementation
    if implementation in ("sdpa", "eager", PACKED_ATTENTION) or _runs_variable_length(config):
        return None
    return f"its attention implementation is {implementation!r}, not 'sdpa', 'eager' or flash attention"


def is_bidirectional(model: PreTrainedModel) -> bool:
    """Whether tokens attend to later ones too, by the model's config.

    Raises: ValueError if only its attention layers say so: masks would make rows with padding causal, and others not.
    """
    config = model.config.get_text_config()
    # Gemma 1 and 2 read the second setting in their layers alone (transformers 5.16-5.23).
    is_set = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if not getattr(config, "is_causal", True) or (is_set and config.model_type not in ("gemma", "gemma2")):
        return True
    layers = model.modules() if model.config.model_type in PACKED_MODEL_TYPES else ()  # not vision towers
    if any(getattr(layer, "is_causal", None) is False for layer in layers):
        raise ValueError(
            f"the attention layers of {type(model).__name__} are bidirectional (is_causal=False), but its masks are "
            "causal. Set model.config.is_causal=False."
        )
    return False


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Switch the model's attention layers to packed rows; returns whether the rows need a segment table.

    Flash attention chosen by the user stays: it finds the segments from `position_ids`, and prefixes cannot be shared.
    """
    if _runs_variable_length(model.config):
        return False
    if model.config._attn_implementation != PACKED_ATTENTION:
        model.set_attn_implementation(PACKED_ATTENTION)
    # PEFT's copies of layers (layer_replication, modules_to_save) have copies of the config.
    for module in model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "model_type", None) == model.config.model_type:
            config._attn_implementation = PACKED_ATTENTION
    return True


def _runs_variable_length(config: PretrainedConfig) -> bool:
    return str(config._attn_implementation).startswith(VARIABLE_LENGTH_IMPLEMENTATIONS)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
