"""A plain output head, `(weight, bias)`, over one chunk of hidden states at a time."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from trl.tensors.softmax_rows import LogitRule, Statistics, TokenScores, Workspace, row_slopes_, score_rows

PLAIN_LOGITS = LogitRule()
NOTHING_ELSE = Statistics()
SlopesOf = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]
"""(log-probs of a chunk (C,), which tokens these are) -> the loss's slopes over their log-probs and entropies."""

# Bytes of one buffer of logits. On a CPU the products are within 5 % of their best from 128 rows on (below that, adding
# up the head's gradient costs more than computing it), and more than 512 rows buy nothing; measured at vocabularies of
# 5k and 152k, widths of 256 and 512. An accelerator needs larger products to stay busy.
CPU_CHUNK_BYTES = 96 * 2**20
CPU_CHUNK_ROWS = (128, 512)
ACCELERATOR_CHUNK_BYTES = 2**30
ACCELERATOR_CHUNK_ROWS = (512, 16384)


def default_chunk_size(vocabulary: int, *, itemsize: int, device: torch.device) -> int:
    """Rows of logits to compute at a time.

    >>> default_chunk_size(152_000, itemsize=4, device=torch.device("cpu"))
    165
    """
    on_cpu = device.type == "cpu"
    budget = CPU_CHUNK_BYTES if on_cpu else ACCELERATOR_CHUNK_BYTES
    fewest, most = CPU_CHUNK_ROWS if on_cpu else ACCELERATOR_CHUNK_ROWS
    return max(fewest, min(most, budget // (vocabulary * itemsize)))


def chunk_size_of_any_head(hidden: Tensor) -> int:
    """The fewest rows that keep the products efficient: the vocabulary is unknown until the head ran."""
    return (CPU_CHUNK_ROWS if hidden.device.type == "cpu" else ACCELERATOR_CHUNK_ROWS)[0]


def without_autocast(device: str) -> AbstractContextManager[object]:
    """A block without autocast on a type of device."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def chunks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `range(count)`.

    >>> list(chunks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


@dataclass(frozen=True, slots=True)
class Scoring:
    """Settings that the chunks of a call share; logits, statistics and gradient sums are in `exact_dtype`."""

    rule: LogitRule
    wanted: Statistics
    chunk_size: int
    product_dtype: torch.dtype
    exact_dtype: torch.dtype

    @classmethod
    def over(
        cls, hidden: Tensor, weight: Tensor, *, rule: LogitRule, wanted: Statistics, chunk_size: int | None
    ) -> "Scoring":
        """Settings for these tensors: dtype from autocast where it is on, else the wider of the two."""
        dtype, device = torch.promote_types(hidden.dtype, weight.dtype), hidden.device
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        exact, count = torch.promote_types(dtype, torch.float32), max(1, len(hidden))
        size = chunk_size or default_chunk_size(len(weight), itemsize=exact.itemsize, device=device)
        if chunk_size is None:  # even chunks: a short one costs as much in sums
            size = math.ceil(count / math.ceil(count / size))
        return cls(rule, wanted, min(size, count), dtype, exact)

    def run(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *,
        wants: Sequence[bool] = (False, False, False), slopes_of: SlopesOf | None = None,
        kept: list[Tensor] | None = None,
    ) -> "tuple[TokenScores, HeadGradients]":  # fmt: skip
        """Scores of all tokens, and gradients of hidden states, weight and bias where `wants`, by the loss's slopes.

        `kept` holds the chunks' logits: an empty list takes them, a full one has them from an earlier call.
        """
        wanted, exact, dtype = self.wanted, self.exact_dtype, self.product_dtype
        computed = (True, wanted.entropy, wanted.correct, wanted.collision, wanted.mean_logit)
        scores = TokenScores._make(
            hidden.new_empty(len(hidden), dtype=torch.bool if number == 2 else exact) if there else None
            for number, there in enumerate(computed)
        )
        make = torch.empty if len(hidden) else torch.zeros  # the first chunk writes
        inputs = zip((hidden, weight, bias), wants, strict=True)
        needed = (x if want else None for x, want in inputs)
        sums = HeadGradients(*(None if x is None else make(x.shape, dtype=exact, device=x.device) for x in needed))
        with without_autocast(hidden.device.type):
            head = Head(weight.to(dtype), None if bias is None else bias.to(dtype))
            # As few buffers as the steps on a chunk allow.
            caps = any(wants) and self.rule.soft_cap is not None
            shifted = hidden.new_empty((self.chunk_size, len(weight)), dtype=exact)
            logits = torch.empty_like(shifted) if caps and kept is None else shifted
            exps = torch.empty_like(shifted) if caps or wanted.entropy else shifted
            space = Workspace(logits, shifted, exps)
            ties = dtype.itemsize < 4 or self.rule.soft_cap is not None
            for number, rows in enumerate(chunks(len(hidden), self.chunk_size)):
                part = Workspace._make(buffer[: rows.stop - rows.start] for buffer in space)
                if kept is not None and number < len(kept):
                    part = part._replace(logits=kept[number])
                else:
                    if kept is not None:
                        part = part._replace(logits=torch.empty_like(part.logits))
                        kept.append(part.logits)
                    head.logits_into(part.logits, hidden[rows], self.rule)
                chunk = score_rows(part, targets[rows], rule=self.rule, wanted=wanted, ties=ties)
                for whole, values in zip(scores, chunk.scores, strict=True):
                    if whole is not None and values is not None:
                        whole[rows] = values
                if slopes_of is None:
                    continue
                slopes = slopes_of(chunk.scores.logps, rows)
                if any(wants):
                    factors = row_slopes_(part, chunk, targets[rows], self.rule, *slopes)
                    # float16 cannot hold slopes that are made before the loss is scaled.
                    gradient_dtype = torch.float32 if dtype == torch.float16 else dtype
                    sums.add(rows, part.exps, factors, hidden[rows], head, gradient_dtype)
        return scores, sums


@dataclass(frozen=True, slots=True)
class Head:
    """Weight `(V, H)` and bias `(V,)` of an output head, in the dtype of the products."""

    weight: Tensor
    bias: Tensor | None

    def logits_into(self, out: Tensor, hidden: Tensor, rule: LogitRule) -> Tensor:
        """Logits of `hidden` `(C, H)` written to `out` `(C, V)`; products in the head's dtype."""
        buffer = out if out.dtype == self.weight.dtype else None
        hidden = hidden.to(self.weight.dtype)
        if self.bias is None:
            products = torch.mm(hidden, self.weight.t(), out=buffer)
        else:
            products = torch.addmm(self.bias, hidden, self.weight.t(), out=buffer)
        return rule.apply_(products if buffer is not None else out.copy_(products))


@dataclass(frozen=True, slots=True)
class HeadGradients:
    """Sums of the gradients of hidden states, weight and bias; None where an input needs none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def add(self, rows: slice, slopes: Tensor, factors: Tensor, hidden: Tensor, head: Head, dtype: torch.dtype) -> None:
        """Add a chunk with the slopes `factors * slopes` over the head's products `(C, V)`; new products in `dtype`."""
        exact, before = slopes.dtype, 0 if rows.start == 0 else 1
        if self.bias is not None:
            self.bias.addmv_(slopes.t(), factors.squeeze(1), beta=before)
        narrow = slopes.to(dtype)
        if self.hidden is not None:
            torch.mul(torch.mm(narrow, head.weight.to(dtype)), factors, out=self.hidden[rows])
        if self.weight is None:
            return
        weighted = (hidden.to(exact) * factors).to(dtype)
        if dtype == exact:
            self.weight.addmm_(narrow.t(), weighted, beta=before)
        else:
            product = torch.mm(narrow.t(), weighted)
            _ = self.weight.add_(product) if before else self.weight.copy_(product)

    def cast(self, *inputs: Tensor | None, slope: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The sums (times a scalar `slope`, in place) in the dtypes of hidden states, weight and bias."""
        sums = (self.hidden, self.weight, self.bias)
        if slope is not None:
            sums = tuple(None if x is None else x.mul_(slope) for x in sums)
        pairs = zip(sums, inputs, strict=True)
        return tuple(None if x is None or like is None else x.to(like.dtype) for x, like in pairs)
