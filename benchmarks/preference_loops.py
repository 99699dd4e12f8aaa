"""Optimiser steps of DPO, reward modelling and KTO written by hand: what those of our trainers are compared with.

Each method stands here twice. `Padded...` is the usual short loop: prompt and completion of every sequence in a row of
its own, padded to the longest, logits everywhere. `Bare...` uses every trick: one flat row of real tokens in which a
prompt stands once, attention per branch, and for language models our scoring primitive (`trl.tensors.logprobs`) on the
completions alone; nothing else of `trl`, and no trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from benchmarks.data import Row
from benchmarks.variants import Loop, Recipe
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel

from trl.tensors.logprobs import token_scores

BETA = 0.1
TREE_ATTENTION = "benchmark_trees"
Sequences = list[tuple[list[int], list[int]]]
"""Prompt and completion of each sequence."""
Trees = list[tuple[list[int], list[list[int]]]]
"""Prompts, each with its completions."""


def reference_of(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy whose weights differ a little, always by the same numbers: log-ratios of 0 would hide errors."""
    reference, generator = copy.deepcopy(model).requires_grad_(False), torch.Generator().manual_seed(1)
    for parameter in reference.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(noise, alpha=0.01)
    return reference.eval()


# ---- padded rows


def pad_sequences(sequences: Sequences) -> dict[str, Tensor]:
    """Rows padded on the right, with labels of -100 on prompts and padding."""
    ids = [torch.tensor(prompt + completion) for prompt, completion in sequences]
    labels = [torch.tensor([-100] * len(prompt) + completion, dtype=torch.int64) for prompt, completion in sequences]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(part) for part in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def padded_logps(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Log-prob of each row's completion, from logits at every position."""
    logits = model(batch["input_ids"], batch["attention_mask"], use_cache=False).logits
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)  # moving labels saves a copy of the logits
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return -losses.view_as(targets).sum(dim=1)


# ---- one flat row of trees


class Call(NamedTuple):
    """One call of the attention kernel: the next `length` queries of the row.

    They see themselves and, behind a prompt, the first `prompt` keys of the call number `tree`, under a mask.
    """

    length: int
    tree: int
    prompt: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class FlatRow:
    """Token ids and positions `(1, N)`, the kernel's calls, and where each completion lies in the row."""

    ids: Tensor
    positions: Tensor
    calls: list[Call]
    spans: list[tuple[int, int]]
    prompt_ends: list[int]

    def inputs(self) -> dict[str, Any]:
        return {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "use_cache": False,
            "calls": self.calls,
        }


def flatten(trees: Trees) -> FlatRow:
    """Each prompt once, with its first completion right behind it: both together are a plain causal sequence."""
    ids: list[int] = []
    positions: list[Tensor] = []
    calls: list[Call] = []
    spans, prompt_ends = [], []
    for prompt, completions in trees:
        size = len(prompt)
        prompt_ends += [len(ids) + size - 1] * len(completions)
        ids += prompt
        positions.append(torch.arange(size))
        for number, completion in enumerate(completions):
            length = len(completion)
            spans.append((len(ids), len(ids) + length))
            ids += completion
            positions.append(torch.arange(size, size + length))
            if number == 0:
                calls.append(Call(size + length, len(calls), 0, None))
                continue
            hidden = torch.ones(length, size + length, dtype=torch.bool).triu(size + 1)
            mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
            calls.append(Call(length, len(calls) - number, size, mask))
    return FlatRow(torch.tensor([ids]), torch.cat(positions)[None], calls, spans, prompt_ends)


def _tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, calls: list[Call],
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    lengths = [call.length for call in calls]
    queries, keys, values = (part.split(lengths, dim=2) for part in (query, key, value))
    parts = []
    for call, q, k, v in zip(calls, queries, keys, values, strict=True):
        if call.prompt:
            k = torch.cat([keys[call.tree][:, :, : call.prompt], k], dim=2)
            v = torch.cat([values[call.tree][:, :, : call.prompt], v], dim=2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=call.mask, is_causal=call.mask is None, scale=scaling, enable_gqa=True
        )
        parts.append(out.transpose(1, 2))
    return torch.cat(parts, dim=1), None


# No mask function under this name: transformers then builds no mask.
AttentionInterface.register(TREE_ATTENTION, _tree_attention)


def tree_logps(model: PreTrainedModel, row: FlatRow) -> Tensor:
    """Log-prob of each completion of a flat row."""
    hidden = model.model(**row.inputs()).last_hidden_state[0]
    lengths = torch.tensor([end - start for start, end in row.spans])
    targets = torch.cat([torch.arange(*span) for span in row.spans])
    source = targets - 1
    source[lengths.cumsum(0) - lengths] = torch.tensor(row.prompt_ends)
    logps = token_scores(hidden[source], model.lm_head.weight, row.ids[0, targets]).logps
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return logps.new_zeros(len(lengths)).index_add(0, sequence, logps)


class _BareLoop(Loop):
    """A loop over flat rows."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        self.model.set_attn_implementation(TREE_ATTENTION)


# ---- DPO


class PaddedDPO(Loop):
    """Chosen and rejected rows together, once through the policy and once through the reference."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        self.reference = reference_of(model)

    def loss(self, rows: Sequence[Row]) -> Tensor:
        sides = ("chosen_input_ids", "rejected_input_ids")
        batch = pad_sequences([(row["prompt_input_ids"], row[side]) for side in sides for row in rows])
        with torch.no_grad():
            reference = padded_logps(self.reference, batch)
        return dpo_loss(*(padded_logps(self.model, batch) - reference).chunk(2))


class BareDPO(_BareLoop):
    """Every trick; `shared=False` gives each completion a prompt of its own."""

    shared = True

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        self.reference = reference_of(model)
        self.reference.set_attn_implementation(TREE_ATTENTION)

    def loss(self, rows: Sequence[Row]) -> Tensor:
        row = flatten([(r["prompt_input_ids"], [r["chosen_input_ids"], r["rejected_input_ids"]]) for r in rows])
        with torch.no_grad():
            reference = tree_logps(self.reference, row)
        ratios = tree_logps(self.model, row) - reference
        return dpo_loss(ratios[0::2], ratios[1::2])


def dpo_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Mean of `-log sigmoid(beta (chosen - rejected))` over log-ratios."""
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


# ---- reward models


class PaddedReward(Loop):
    """Chosen and rejected rows together, scores of every position."""

    def loss(self, rows: Sequence[Row]) -> Tensor:
        sides = ("chosen_input_ids", "rejected_input_ids")
        batch = pad_sequences([([], row[side]) for side in sides for row in rows])
        del batch["labels"]
        chosen, rejected = self.model(**batch, use_cache=False).logits[:, 0].chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()


class BareReward(_BareLoop):
    """What the sequences of a pair begin with in common stands once."""

    def loss(self, rows: Sequence[Row]) -> Tensor:
        row = flatten([_common_beginning(r["chosen_input_ids"], r["rejected_input_ids"]) for r in rows])
        hidden = self.model.model(**row.inputs()).last_hidden_state[0]
        ends = torch.tensor([end - 1 for _, end in row.spans])
        scores = self.model.score(hidden[ends])[:, 0]
        return -F.logsigmoid(scores[0::2] - scores[1::2]).mean()


def _common_beginning(chosen: list[int], rejected: list[int]) -> tuple[list[int], list[list[int]]]:
    shared, most = 0, min(len(chosen), len(rejected)) - 1
    while shared < most and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], [chosen[shared:], rejected[shared:]]


# ---- KTO


class PaddedKTO(Loop):
    """The rows' own completions and the mismatched ones, through policy and reference each: four passes."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        self.reference = reference_of(model)

    def loss(self, rows: Sequence[Row]) -> Tensor:
        own, other = (
            pad_sequences([(row["prompt_input_ids"], row[name]) for row in rows])
            for name in ("completion_input_ids", "KL_completion_input_ids")
        )
        with torch.no_grad():
            kl = padded_logps(self.model, other) - padded_logps(self.reference, other)
            reference = padded_logps(self.reference, own)
        return kto_loss(padded_logps(self.model, own) - reference, kl, rows)


class BareKTO(_BareLoop):
    """Both completions behind one prompt for the reference; the policy's mismatched ones in a pass without gradient."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        self.reference = reference_of(model)
        self.reference.set_attn_implementation(TREE_ATTENTION)

    def loss(self, rows: Sequence[Row]) -> Tensor:
        both = ("completion_input_ids", "KL_completion_input_ids")
        trees = [(row["prompt_input_ids"], [row[name] for name in both]) for row in rows]
        own, mismatched = (flatten([(prompt, [pair[side]]) for prompt, pair in trees]) for side in (0, 1))
        with torch.no_grad():
            reference = tree_logps(self.reference, flatten(trees))
            kl = tree_logps(self.model, mismatched) - reference[1::2]
        logps = tree_logps(self.model, own)
        return kto_loss(logps - reference[0::2], kl, rows)


def kto_loss(ratios: Tensor, kl_ratios: Tensor, rows: Sequence[Row]) -> Tensor:
    """Mean of `1 - sigmoid(+-beta (ratio - kl))`, minus where a completion is not desirable."""
    sign = torch.tensor([1.0 if row["label"] else -1.0 for row in rows])
    return torch.sigmoid(-sign * BETA * (ratios - kl_ratios.mean().clamp(min=0))).mean()
