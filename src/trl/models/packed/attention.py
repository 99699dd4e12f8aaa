"""Attention over a packed row of segments, registered with transformers' attention interface.

The row has real tokens only. Its segments are passed as the attention mask: an int64 table `(1, 1, S, 4)`
(`Segments.table`), which transformers gives to every attention layer unchanged, also in gradient checkpointing. Each
segment attends to its prefix and itself in a call of PyTorch's kernel, which those of equal lengths share: no mask as
large as the row, no padding, no prompt computed twice. Calls without a table (generation, padded rows) use
transformers' SDPA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from trl.models.packed.head_exchange import over_heads
from trl.models.packed.sequence_group import SequenceGroup
from trl.tensors.segments import Segments

PACKED_ATTENTION = "trl_packed"
# Attention whose window or cap the implementation the user chose handles itself, over position_ids.
FLASH_ATTENTION_VARIANTS = {
    "flash_attention_2",
    "flash_attention_3",
    "kernels-community/flash-attn2",
    "kernels-community/flash-attn3",
    "kernels-community/vllm-flash-attn3",
}
_SINK_SIZE = 8  # more entries of a head, of which the first holds a sink's score: kernels want a multiple of 8


class Reach(NamedTuple):
    """The keys that a query sees: the last `tokens` (a sliding window), or those of its own chunk of so many."""

    tokens: int
    is_chunk: bool = False

    def first_key(self, positions: Tensor) -> Tensor:
        """The first position that queries at `positions` see."""
        return positions - positions % self.tokens if self.is_chunk else positions - self.tokens + 1


def reach_of(module: nn.Module, sliding_window: int | None) -> Reach | None:
    """The reach of an attention layer, by what its interface was given, its layer's type, or what it has itself."""
    config: Any = getattr(module, "config", None)
    if sliding_window:
        return Reach(sliding_window)
    if types := getattr(config, "layer_types", None):
        is_chunk, is_window = (types[module.layer_idx] == f"{kind}_attention" for kind in ("chunked", "sliding"))
        tokens = config.attention_chunk_size if is_chunk else config.sliding_window if is_window else None
        return Reach(tokens, is_chunk) if tokens else None
    # Qwen2-MoE keeps its window on the module and builds it into the mask alone (transformers 5.19).
    window = getattr(module, "sliding_window", None)
    return Reach(window) if window else None


class _Part(NamedTuple):
    """The row's next `length` queries over their own keys and the first `prompt` of part `prefix`."""

    length: int
    prompt: int
    prefix: int


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

    A prompt and the branch directly after it are one plain sequence and one part.
    """

    segments: Segments
    parts: tuple[_Part, ...]
    calls: tuple[list[int], ...]  # the parts of equal lengths
    masks: dict[tuple[int, int, Reach | None, torch.dtype], Tensor]  # those of the calls, for all layers
    bounds: list[_Bounds]  # of the variable-length kernel, once they are known
    group: SequenceGroup | None = None  # that shares the row's tokens

    @classmethod
    def of(cls, table: Tensor) -> _Plan:
        plan = _PLANS.get(table)
        if plan is not None:
            return plan
        group, rows = SequenceGroup.of_table(table)
        segments, parts = Segments(rows), list[_Part]()
        prefixes: dict[int, int] = {}  # start of a plain segment -> its part
        for start, length, prefix_start, prefix in segments.rows:
            if prefix and prefix_start + prefix == start:
                parts[-1] = parts[-1]._replace(length=prefix + length)
            elif prefix:
                parts.append(_Part(length, prefix, prefixes[prefix_start]))
            else:
                prefixes[start] = len(parts)
                parts.append(_Part(length, 0, len(parts)))
        calls: dict[tuple[int, int], list[int]] = {}
        for number, part in enumerate(parts):
            calls.setdefault(part[:2], []).append(number)
        plan = _PLANS[table] = cls(segments, tuple(parts), tuple(calls.values()), {}, [], group)
        return plan

    def mask(self, length: int, seen: int, reach: Reach | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The mask of the last `length` of `seen` tokens, for all layers: bool, or 0 and -inf in a floating dtype."""
        key = (length, seen, reach, dtype)
        if key not in self.masks:
            mask = _causal_mask(length, seen, reach, device)
            if dtype != torch.bool:  # the kernel would convert it once per layer, and keep it for backward
                mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, -torch.inf)
            self.masks[key] = mask
        return self.masks[key]


_PLANS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, held: Sequence[tuple[Tensor, Tensor] | None] = (), **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of every segment over (its prompt | itself): `query (1, heads, N, D) -> (1, N, heads, D')`.

    Values may have another size D' than keys. `s_aux` `(heads,)` are scores of sinks: keys without a value (gpt-oss).
    Plain segments may have keys and values `(heads, tokens, D)` of earlier tokens, which are `held`. Without a segment
    table this is transformers' SDPA, written out with a soft cap (Gemma 2).
    """
    if not is_table(attention_mask):
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling,
                sliding_window=sliding_window, **kwargs,
            )  # fmt: skip
        key, value = (repeat_kv(part, query.shape[1] // part.shape[1]) for part in (key, value))
        output = _attend(query, key, value, attention_mask, dropout, scaling, softcap, s_aux)
        return output.transpose(1, 2).contiguous(), None

    plan = _Plan.of(attention_mask)
    if has_temperature(module):
        before = held or [None] * len(plan.parts)
        counts = [
            [0 if pair is None else pair[0].shape[1], part.length]
            for pair, part in zip(before, plan.parts, strict=True)
        ]
        earlier, lengths = torch.tensor(counts).T
        places = plan.segments.position_ids()[0] + earlier.repeat_interleave(lengths)
        query = tempered(module, query, places if plan.group is None else plan.group.cut(places, 0))
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)  # rotary embeddings leave queries and keys in float32
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    attend = partial(_over_segments, plan, held, dropout, scaling, reach_of(module, sliding_window), softcap)
    if plan.group is None:
        return attend(query, key, value, s_aux), None
    if dropout:
        raise ValueError(
            f"the model drops {dropout:g} of its attention's weights, which no process has all of with sp_size="
            f"{plan.group.size}. Set its dropout to 0, for example by model_init_kwargs={{'attention_dropout': 0.0}}."
        )
    return over_heads(plan.group, plan.segments.total, attend, query, key, value, s_aux), None


def _over_segments(
    plan: _Plan, held: Sequence[tuple[Tensor, Tensor] | None], dropout: float, scaling: float | None,
    reach: Reach | None, softcap: float | None, query: Tensor, key: Tensor, value: Tensor, s_aux: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of all tokens of a row: `(1, heads, N, D) -> (1, N, heads, D')`."""
    longest = max((pair[0].shape[1] for pair in held if pair is not None), default=0)
    if reach and longest + max(part.prompt + part.length for part in plan.parts) <= reach.tokens:
        reach = None  # no segment is long enough to meet it
    device = query.device.type
    is_plain = softcap is None and s_aux is None and not (reach and reach.is_chunk)
    plain = is_plain and not longest and dropout == 0.0 and value.shape[-1] <= query.shape[-1] <= 256
    if plain and query.is_cuda and query.dtype.itemsize == 2:
        return _variable_length(query, key, value, plan, scaling, reach)
    groups, repeats = query.shape[1] // key.shape[1], 1
    if groups > 1 and (softcap is not None or s_aux is not None or device != "cpu"):
        # On a CPU SDPA shares key heads itself, 10 % faster; other devices would leave their fast kernels for it.
        key, value, repeats = repeat_kv(key, groups), repeat_kv(value, groups), groups
    lengths = [part.length for part in plan.parts]
    queries, keys, values = (states.split(lengths, dim=2) for states in (query, key, value))
    outputs: list[Any] = [None] * len(lengths)
    for call in [[number] for number in range(len(lengths))] if longest else plan.calls:
        length, prompt, _ = plan.parts[call[0]]
        q, k, v = (_joined([states[number] for number in call]) for states in (queries, keys, values))
        if longest and (earlier := held[call[0]]) is not None:
            k, v = (
                torch.cat([repeat_kv(states[None], repeats), newer], dim=2)
                for states, newer in zip(earlier, (k, v), strict=True)
            )
        if prompt:
            prefixes = [plan.parts[number].prefix for number in call]
            k, v = (
                torch.cat([_joined([states[number][:, :, :prompt] for number in prefixes]), newer], dim=2)
                for states, newer in ((keys, k), (values, v))
            )
        seen = k.shape[2]
        if softcap is None and s_aux is None and length in (1, seen) and (reach is None or seen <= reach.tokens):
            output = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, scale=scaling, is_causal=length > 1,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
        else:
            mask = plan.mask(length, seen, reach, q.dtype if softcap is None else torch.bool, q.device)
            output = _attend(q, k, v, mask, dropout, scaling, softcap, s_aux)
        output = output.transpose(1, 2)
        for number, states in zip(call, output.split(1) if len(call) > 1 else [output], strict=True):
            outputs[number] = states
    return torch.cat(outputs, dim=1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts `(1, heads, L, D)` of a call as one tensor, `(parts, heads, L, D)`."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]  # type: ignore[arg-type]


def is_table(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Whether an attention mask is a segment table."""
    return mask is not None and mask.dtype == torch.int64 and mask.ndim == 4 and mask.shape[-1] == 4


def has_temperature(module: nn.Module) -> bool:
    """Whether an attention layer scales queries by their places (Llama 4's layers without positions)."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not module.use_rope


def tempered(module: nn.Module, query: Tensor, positions: Tensor) -> Tensor:
    """Queries `(1, heads, N, D)` as at `positions` `(N,)`: a layer takes their places in the row (transformers 5)."""
    floor_scale, attn_scale = (getattr(module, name) for name in ("floor_scale", "attn_scale"))

    def scale_of(positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0

    factor = scale_of(positions.to(query.device)) / scale_of(torch.arange(len(positions), device=query.device))
    return (query * factor[:, None]).to(query.dtype)


def _causal_mask(length: int, seen: int, reach: Reach | None, device: torch.device) -> Tensor:
    """Bool `(1, 1, length, seen)`, True where a query sees a key; the last query sees the last key."""
    query = torch.arange(seen - length, seen, device=device)[:, None]
    key = torch.arange(seen, device=device)[None]
    mask = key <= query
    if reach is not None:
        mask &= key >= reach.first_key(query)
    return mask[None, None]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with a mask (None: causal), sinks, and scores `cap * tanh(score / cap)` (arXiv:2408.00118)."""
    scale: float = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is None:
        mask = _causal_mask(query.shape[2], key.shape[2], None, query.device)
    if sinks is not None:
        query, key, value, mask = _with_sinks(query, key, value, mask, sinks.to(query.dtype) / scale)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return F.dropout(weights.to(query.dtype), dropout) @ value


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
    """One more key of each head, without a value, whose product with every query is its sink: all have all heads."""
    query = F.pad(query, (0, 1), value=1.0)
    query = F.pad(query, (0, _SINK_SIZE - 1))
    rows, heads = key.shape[:2]
    key = F.pad(key, (0, _SINK_SIZE, 1, 0))
    sink = F.pad(sinks.view(1, heads, 1, 1).expand(rows, -1, -1, -1), (key.shape[3] - _SINK_SIZE, _SINK_SIZE - 1))
    key = torch.cat([sink, key[:, :, 1:]], dim=2)
    mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)
    return query, key, F.pad(value, (0, 0, 1, 0)), mask


# ---- one kernel for all segments on a GPU


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, plan: _Plan, scaling: float | None, reach: Reach | None
) -> Tensor:
    """PyTorch's variable-length flash attention; keys of a prompt are gathered once per branch.

    Values smaller than keys (latent attention) are padded.
    """
    size = value.shape[-1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if size < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - size))
    if not plan.bounds:
        plan.bounds.append(_variable_length_bounds(plan.segments, query.device))
    bounds = plan.bounds[0]
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    if bounds.gather is not None:
        key, value = key[bounds.gather], value[bounds.gather]
    output = varlen_attn(
        query.contiguous(), key.contiguous(), value.contiguous(), bounds.queries, bounds.keys,
        bounds.longest_query, bounds.longest_key, scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        window_size=(-1 if reach is None else reach.tokens - 1, 0),
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output[None, ..., :size]


def _variable_length_bounds(segments: Segments, device: torch.device) -> _Bounds:
    lengths, seen, gather = segments.length, segments.length + segments.prefix_length, None
    if segments.prefix_length.any():
        spans = []
        for start, length, prefix_start, prefix_length in segments.rows:
            spans.append(torch.arange(prefix_start, prefix_start + prefix_length))
            spans.append(torch.arange(start, start + length))
        gather = torch.cat(spans).to(device)
    queries, keys = (F.pad(counts.cumsum(0), (1, 0)).to(device, torch.int32) for counts in (lengths, seen))
    return _Bounds(queries, keys, int(lengths.max()), int(seen.max()), gather)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
