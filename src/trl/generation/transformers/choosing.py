"""From logits to tokens: penalty, temperature, truncation, one draw for each row, log-probs; logits processors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from trl.generation.engine import Sampling

_BLOCK = 256  # tokens per block of the two-level search
_LARGEST_UNIFORM = 1 - 2.0**-33  # times a sum it stays below it
_FEW = 1024  # tokens that hold the nucleus of most distributions


class Chosen(NamedTuple):
    """One token for each row."""

    ids: Tensor  # (R,)
    logps: Tensor  # (R,), nats, under the distribution they were drawn from
    kept: Tensor | None  # (R,), nats: log of the kept mass


def choose(logits: Tensor, numbers: Tensor, sampling: Sampling) -> Chosen:
    """One token for each row of `logits` `(R, V)`, which are overwritten, by `numbers` `(R,)` in [0, 1).

    [0, 1) is divided among the tokens in the order of their ids, by probability. A result depends on its row only.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values.sub_(values.amax(dim=1, keepdim=True))
    if sampling.temperature not in (0.0, 1.0):
        values.div_(sampling.temperature)
    exps = pad(values, (0, -values.shape[1] % _BLOCK), value=-math.inf).exp_()
    totals, kept = exps.sum(dim=1), None
    if sampling.greedy:
        ids = values.argmax(dim=1)
    else:
        if sampling.truncates_distribution:
            exps[:, : values.shape[1]].masked_fill_(values < _border(values, exps, sampling)[:, None], 0.0)
            remaining = exps.sum(dim=1)
            kept, totals = (remaining / totals).log(), remaining
        ids = _invert(exps, numbers).clamp_(max=values.shape[1] - 1)  # larger if logits are not finite
    return Chosen(ids, values.gather(1, ids[:, None])[:, 0] - totals.log(), kept)


def _invert(exps: Tensor, numbers: Tensor) -> Tensor:
    """The token in whose part of the cumulative `exps` `(R, V')` each number falls; its block is found first."""
    rows, width = exps.shape
    blocks = exps.view(rows, width // _BLOCK, _BLOCK)
    sums = blocks.sum(dim=2).double()
    ends = running_sums(sums)
    target = numbers.clamp(max=_LARGEST_UNIFORM)[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    width_of_block = sums.gather(1, block)
    share = (target - ends.gather(1, block) + width_of_block) / width_of_block
    inside = running_sums(blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0].double())
    target = share.clamp(0.0, _LARGEST_UNIFORM) * inside[:, -1:]
    return (block * _BLOCK + torch.searchsorted(inside, target, right=True))[:, 0]


def running_sums(values: Tensor) -> Tensor:
    """`values.cumsum(dim=1)` `(R, N)`; by matrix products where torch has no deterministic kernel (GPUs)."""
    needs_products = values.is_cuda and torch.are_deterministic_algorithms_enabled()
    return _sums_by_blocks(values) if needs_products else values.cumsum(dim=1)


def _sums_by_blocks(values: Tensor) -> Tensor:
    rows, width = values.shape
    blocks = pad(values, (0, -width % _BLOCK)).view(rows, -1, _BLOCK)
    inside = blocks @ values.new_ones(_BLOCK, _BLOCK).triu()
    if inside.shape[1] > 1:
        before = _sums_by_blocks(inside[:, :, -1])[:, :-1]
        inside = inside + pad(before, (1, 0))[:, :, None]
    return inside.view(rows, -1)[:, :width].contiguous()


def _border(values: Tensor, exps: Tensor, sampling: Sampling) -> Tensor:
    """The lowest value `(R,)` that top-k, top-p and min-p keep, in this order; the largest value of each row is 0."""
    border = values.new_full((len(values),), -math.inf)
    top_k = min(sampling.top_k or 0, values.shape[1])
    nucleus = sampling.top_p is not None and sampling.top_p < 1
    ranked = values.topk(top_k, dim=1).values if top_k else None
    if ranked is not None:
        border = ranked[:, -1]
    if nucleus:
        border = torch.maximum(border, _nucleus_border(values, exps, ranked, sampling.top_p or 1.0))
    if sampling.min_p:
        border = border.clamp(min=math.log(sampling.min_p))
    return border


def _nucleus_border(values: Tensor, exps: Tensor, ranked: Tensor | None, top_p: float) -> Tensor:
    """The lowest value of the smallest set with `top_p` of the mass (arXiv:1904.09751, eq. 2)."""
    if ranked is not None:
        return _last_within(ranked, ranked.exp().sum(dim=1, keepdim=True) * top_p)[0]
    wanted = exps.sum(dim=1, keepdim=True) * top_p
    few = min(_FEW, values.shape[1])
    border, enough = _last_within(values.topk(few, dim=1).values, wanted)
    if few < values.shape[1] and not bool(enough.all()):
        wide = (~enough).nonzero()[:, 0]
        border[wide] = _last_within(values[wide].sort(dim=1, descending=True).values, wanted[wide])[0]
    return border


def _last_within(ranked: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The last of the `ranked` values with less than `wanted` mass before it; whether they have that much."""
    mass = ranked.exp()
    ends = running_sums(mass.double())
    count = (ends - mass < wanted).sum(dim=1, keepdim=True)
    return ranked.gather(1, (count - 1).clamp(min=0))[:, 0], ends[:, -1] >= wanted[:, 0]


def penalise_(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of the `seen` `(R, V)` tokens by `penalty`, in place."""
    scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
    return logits.copy_(torch.where(seen, scaled, logits))


class Processors:
    """The logits processors of `core.generate` with these settings, except minimum lengths; independent of the batch.

    `ends` are the stop tokens. Temperature, truncation and repetition penalty are included, in transformers' order.
    """

    def __init__(self, core: PreTrainedModel, sampling: Sampling, ends: Sequence[int]) -> None:
        self._core: Any = core
        self._config = GenerationConfig(
            do_sample=not sampling.greedy, temperature=sampling.temperature or 1.0, top_k=sampling.top_k,
            top_p=sampling.top_p, min_p=sampling.min_p, repetition_penalty=sampling.repetition_penalty,
            **dict(sampling.processors),
        )  # fmt: skip
        tokens = torch.tensor(sorted(ends), dtype=torch.int64, device=core.device)
        self._config._eos_token_tensor = tokens if len(tokens) else None  # pyright: ignore[reportAttributeAccessIssue]
        self._of: dict[tuple[int, ...], LogitsProcessorList] = {}
        self._drawn = Sampling(do_sample=not sampling.greedy)  # from the changed logits

    def choose(
        self, logits: Tensor, numbers: Tensor, prompts: Sequence[tuple[int, ...]], begin: Sequence[int] | None,
        ids: Tensor, counts: Tensor,
    ) -> Chosen:  # fmt: skip
        """One token for each row of `logits` `(R, V)`, as drawn by `choose`.

        The first `counts` `(R,)` of `ids` `(R, T)` are generated. `begin` are the first tokens of an encoder-decoder's
        completions, None for a decoder. The kept mass is that of the tokens that the processors keep.
        """
        together = defaultdict(list)
        for row, key in enumerate(zip(prompts, counts.tolist(), strict=True)):
            together[key].append(row)
        changed = torch.empty_like(logits)
        for (prompt, count), rows in together.items():
            start = ids.new_tensor(prompt if begin is None else begin).expand(len(rows), -1)
            seen: Any = torch.cat([start, ids[rows, :count]], dim=1)
            if prompt not in self._of:
                # transformers (5.19) has no public function for this; some processors need the prompt or its length.
                self._of[prompt] = self._core._get_logits_processor(
                    self._config, input_ids_seq_length=start.shape[1], device=self._core.device,
                    encoder_input_ids=torch.tensor([prompt], device=self._core.device), model_kwargs={},
                )  # fmt: skip
            changed[rows] = self._of[prompt](seen, logits[rows])  # type: ignore[arg-type]
        drawn = choose(changed.clone(), numbers, self._drawn)
        if self._drawn.greedy:
            return drawn
        whole = logits.to(drawn.logps) / self._config.temperature
        left = whole.masked_fill(changed == -torch.inf, -torch.inf)
        return drawn._replace(kept=left.logsumexp(dim=1) - whole.logsumexp(dim=1))
