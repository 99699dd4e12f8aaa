"""The key-value cache of rollouts in progress: one copy for each prompt, and the completion tokens of each row.

Rows (completions in progress) and prompts are numbered from 0 without gaps: if one leaves, the last ones move into the
gap. Buffers are preallocated. One that is too small is replaced; all are freed with the last prompt.

Inside `rollout_attention_of(model, cache)` the attention layers of a model's own forward store their keys and values in
the cache: those of a packed row of prompts, then those of one new token for each row. The model's own is not used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from trl.generation.transformers.mixer_states import MixerStates
from trl.generation.transformers.reuse import Held
from trl.generation.transformers.steps import Moves, Step, resized
from trl.models.packed.attention import Reach, has_temperature, packed_attention, reach_of, tempered
from trl.models.packed.support import packing_of
from trl.models.switches import holding
from trl.tensors.heads import without_autocast


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over a part of the keys, and the log-sum-exp of its scores.

    `query (B, heads, M, D)`, `key`, `value` `(B, heads, K, D)`, `bias` broadcastable to `(B, heads, M, K)` ->
    `(B, heads, M, D)` and `(B, heads, M)`, both at least float32: scores in half precision change weights by per cents.
    """
    batch, heads, rows, _ = query.shape
    query, key, value = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
    if query.dtype.itemsize >= 4:
        scores = torch.baddbmm(query.new_empty(1), query, key, beta=0, alpha=scale)
    elif query.is_cuda:
        scores = torch.bmm(query, key, out_dtype=torch.float32).mul_(scale)
    else:
        scores = torch.bmm(query.float(), key.float()).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores.view(batch, heads, rows, -1).add_(bias)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    output = torch.bmm(weights.to(value.dtype), value).to(total.dtype) / total
    return output.view(batch, heads, rows, -1), (peak + total.log()).view(batch, heads, rows)


_FIRST_COLUMNS = 64


class RolloutCache:
    """Keys and values `(..., heads, tokens, D)` of all layers with attention: of G prompts, and of R rows' tokens.

    Layers may differ in heads and sizes, and values in size from keys.
    """

    def __init__(self) -> None:
        self.layers: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        self.lengths: list[int] = []  # of the prompts
        self.capacity = 0  # rows to allocate for
        self.most_columns = 0  # maximum completion length
        self.step: Step | None = None
        self._arriving: tuple[Tensor, int] | None = None
        self.held: Sequence[Held | None] = ()  # of the arriving prompts; empty if nothing is held
        self.states: MixerStates | None = None  # of layers without attention; those of the model that runs first

    def expect_prompts(self, lengths: Sequence[int], device: torch.device, held: Sequence[Held | None] = ()) -> None:
        """Prepare for prompts, of which so many tokens come one after another in the packed row of the next forward.

        The tokens before them are those that are `held`.
        """
        self.held = held if any(held) else ()
        before = [0 if part is None else part.length for part in self.held or [None] * len(lengths)]
        # In the order of `store_prompts`: the packed row, then what is held.
        places = torch.arange(sum(lengths) + sum(before)).split([*lengths, *before])
        rows = [torch.cat(pair) for pair in zip(places[len(lengths) :], places[: len(lengths)], strict=True)]
        self._arriving = (pad_sequence(rows, batch_first=True).to(device), len(self.lengths))
        if self.states is not None:
            self.states.expect_prompts(lengths, device)
        self.lengths += map(len, rows)

    def store_prompts(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values `(heads, N, D)` of a packed row of prompts."""
        assert self._arriving is not None
        (index, first), cache = self._arriving, self.layers[layer]
        held = [part.layers[layer] for part in self.held if part is not None]
        for number, (name, part) in enumerate((("prompt_key", key), ("prompt_value", value))):
            part = torch.cat([part, *(pair[number] for pair in held)], dim=1)
            buffer, count, longest = cache.get(name), len(self.lengths), max(self.lengths)
            if buffer is None or buffer.shape[0] < count or buffer.shape[2] < longest:
                cache[name] = buffer = resized(buffer, (count, part.shape[0], longest, part.shape[2]), part)
            buffer[first:count, :, : index.shape[1]] = part[:, index].transpose(0, 1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float,
        reach: Reach | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store the newest `key`, `value` `(R, heads, D)` and attend: `query (R, H, D) -> (R, H, D)`.

        `sinks` `(H,)` are the scores of one more key of each head, which has no value (gpt-oss).
        """
        step, cache = self.step, self.layers[layer]
        assert step is not None
        own_key, own_value = self._with_newest(cache, step, key, value)
        prompt_bias, own_bias, by_row = step.biases(reach)
        options = {"scale": scale, "softcap": softcap}
        grouped = query.unflatten(1, (key.shape[1], -1))  # (R, heads, Q, D): Q queries share a key head
        completion = attend_part(grouped, own_key, own_value, own_bias, **options)
        table = step.to_slots(grouped).transpose(1, 2)  # (G, heads, per_prompt, Q, D)
        if by_row and prompt_bias is not None:
            prompt_bias = step.to_slots(prompt_bias)[:, None].repeat_interleave(grouped.shape[2], dim=2)
        key, value = (cache[name][: len(step.lengths), :, : step.longest] for name in ("prompt_key", "prompt_value"))
        output, total = (
            part.unflatten(2, table.shape[2:4]).transpose(1, 2).flatten(0, 1)
            for part in attend_part(table.flatten(2, 3), key, value, prompt_bias, **options)
        )
        if step.slots is not None:
            output, total = output[step.slots], total[step.slots]
        share = torch.sigmoid(total - completion[1])  # of the prompt in the sum over both sets of keys
        merged = torch.lerp(completion[0], output, share[..., None])
        if sinks is not None:
            total = torch.logaddexp(total, completion[1])
            merged = merged * torch.sigmoid(total - sinks.view(total.shape[1:]))[..., None]
        return merged.view(len(query), -1, value.shape[3]).to(value.dtype)

    def _with_newest(self, cache: dict[str, Tensor], step: Step, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """The rows' own keys, then their values, with the newest ones stored."""
        for name, part in (("own_key", key), ("own_value", value)):
            buffer = cache.get(name)
            if buffer is None or buffer.shape[0] < len(part) or buffer.shape[2] < step.width:
                columns = _FIRST_COLUMNS
                while columns < step.width:
                    columns *= 2
                columns = max(min(columns, self.most_columns), step.width)
                shape = (max(self.capacity, len(part)), part.shape[1], columns, part.shape[2])
                cache[name] = buffer = resized(buffer, shape, part)
            if step.level:
                buffer[: len(part), :, step.width - 1] = part
            else:
                buffer[step.rows, :, step.columns] = part
            yield buffer[: len(part), :, : step.width]

    def copy_of(self, row: int, tokens: int, prompt: int, prompt_tokens: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of a prompt and of so many of a row's own tokens, by layer, in new memory."""
        layers = {}
        for number, cache in self.layers.items():
            parts = [[cache[f"prompt_{name}"][prompt, :, :prompt_tokens]] for name in ("key", "value")]
            if tokens:
                parts[0].append(cache["own_key"][row, :, :tokens])
                parts[1].append(cache["own_value"][row, :, :tokens])
            layers[number] = torch.cat(parts[0], dim=1), torch.cat(parts[1], dim=1)
        return layers

    def drop_rows(self, moves: Moves, width: int) -> None:
        """Remove rows; `width` is the longest completion so far."""
        if self.states is not None:
            self.states.drop_rows(moves)
        for cache in self.layers.values():
            for name in ("own_key", "own_value"):
                if name in cache:
                    moves.apply(cache[name][:, :, :width])

    def drop_prompts(self, moves: Moves) -> None:
        """Remove prompts."""
        if self.states is not None:
            self.states.drop_prompts(moves)
        self.lengths = [self.lengths[number] for number in moves.order.tolist()]
        for cache in self.layers.values():
            for name in ("prompt_key", "prompt_value"):
                moves.apply(cache[name])
        if not self.lengths:
            self.layers.clear()


ROLLOUT_ATTENTION = "trl_rollout"

_CACHE: ContextVar[RolloutCache] = ContextVar("rollout cache")


def rollout_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of a packed row of prompts or of newest tokens: `query (1, heads, N, D) -> (1, N, heads, D)`."""
    cache, layer = _CACHE.get(), module.layer_idx
    assert isinstance(layer, int)
    query, key = query.to(value.dtype), key.to(value.dtype)  # float32 after rotation under autocast
    if cache.step is None:
        cache.store_prompts(layer, key[0], value[0])
        return packed_attention(
            module, query, key, value, attention_mask, 0.0, scaling,
            sliding_window=sliding_window, softcap=softcap, s_aux=s_aux,
            held=[None if part is None else part.layers[layer] for part in cache.held], **kwargs,
        )  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reach = reach_of(module, sliding_window)
    if has_temperature(module):
        query = tempered(module, query, cache.step.lengths[cache.step.prompt] + cache.step.columns)
    newest = (part[0].transpose(0, 1) for part in (query, key, value))
    with without_autocast(query.device.type):
        output = cache.attend(layer, *newest, scale=scale, reach=reach, softcap=softcap, sinks=s_aux)
    return output[None], None


@contextmanager
def rollout_attention_of(model: PreTrainedModel, cache: RolloutCache) -> Iterator[None]:
    """Inside the block the model's attention layers use `cache`, and its other mixers of tokens the states in it."""
    token = _CACHE.set(cache)
    if cache.states is None and (mixers := packing_of(model).mixers):
        cache.states = MixerStates(model, mixers)
    running = nullcontext() if cache.states is None else cache.states.running(lambda: cache.step)
    try:
        with holding(model.config, "_attn_implementation", ROLLOUT_ATTENTION), running:
            yield
    finally:
        _CACHE.reset(token)


AttentionInterface.register(ROLLOUT_ATTENTION, rollout_attention)
AttentionMaskInterface.register(ROLLOUT_ATTENTION, sdpa_mask)
