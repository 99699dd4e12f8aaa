"""Responses of PPO step by step: generated, scored by a model, and cut into minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trl.collators.preference import seq2seq_batch
from trl.generation.engine import Sampling
from trl.models.scoring.head import ScoreOptions
from trl.rollouts.experience import Experience
from trl.tensors.ragged import Ragged

# Defaults of transformers, under the model's generation config and the arguments of the call.
_DEFAULTS = {"max_length": 20, "do_sample": False, "top_k": 50}


def sampling_of(core: Any, given: Mapping[str, Any]) -> Sampling:
    """The engine's settings for `given` arguments of a transformers model's `generate`, over its generation config.

    A length in the arguments replaces that of a `generation_config` among them, and this the model's.

    Raises: ValueError for what the engine does not support, such as beams.
    """
    single = {name: value for name, value in given.items() if name != "generation_config"}
    config = given.get("generation_config")
    found: dict[str, Any] = {}
    for layer in (_DEFAULTS, _set_fields(core.generation_config), _set_fields(config), single):
        if "max_length" in layer:
            found.pop("max_new_tokens", None)
        found |= layer
        if "max_new_tokens" in layer:
            found.pop("max_length", None)
    return Sampling().updated(found)


def _set_fields(config: Any) -> dict[str, Any]:
    """The fields of a generation config that are set."""
    given = {} if config is None else vars(config)
    return {name: value for name, value in given.items() if value is not None and not name.startswith("_")}


class ResponseScores(NamedTuple):
    """Scores of B responses, each `(B, R)`, 0 after a response's end; `entropies` and `logits (B, R, V)` on request."""

    logps: Tensor
    values: Tensor | None
    entropies: Tensor | None
    logits: Tensor | None


def responses_as_rows(queries: Sequence[Tensor], responses: Sequence[Tensor]) -> Experience:
    """Queries and responses as an `Experience`, on the responses' device."""
    device = responses[0].device
    prompts, completions = (Ragged.of([row.to(device) for row in part]) for part in (queries, responses))
    return Experience(prompts.to(device), completions.to(device))


def score_responses(
    scorer: Any, model: nn.Module, rows: Experience, *, logits: bool = False, entropies: bool = False
) -> ResponseScores:
    """Scores of one forward pass, with gradient unless it is off; equal queries are neighbours, so that they can be shared."""
    prompts = [prompt.tolist() for prompt in rows.prompts.split()]
    order = torch.tensor(sorted(range(len(rows)), key=prompts.__getitem__))
    rows = rows.take(order.to(rows.prompts.values.device))
    is_encoder_decoder = scorer.core.config.is_encoder_decoder
    if is_encoder_decoder:
        pairs = zip(rows.prompts.split(), rows.completions.split(), strict=True)
        columns = [
            {"prompt_input_ids": prompt, "completion_input_ids": completion} for prompt, completion in pairs
        ]
        batch = seq2seq_batch(
            columns, pad_token_id=scorer.pad_token_id, completions=("completion_input_ids",)
        )
    else:
        batch = rows.as_batch(prefix_sharing=scorer.shares_prefixes)
        del batch["rows"]
    batch = {name: value.to(rows.completions.values.device) for name, value in batch.items()}
    options = ScoreOptions(entropy="scored" if entropies else "none")
    lengths, places, chosen = rows.completions.lengths.tolist(), order.argsort().tolist(), None
    if logits:
        scored, whole = scorer.score_with_logits(model, batch, options)
        begins = [0 if is_encoder_decoder else length - 1 for length in rows.prompts.lengths.tolist()]
        parts = zip(whole, begins, lengths, strict=True)
        chosen = torch.cat([row[begin : begin + length] for row, begin, length in parts])
    else:
        scored = scorer.score(model, batch, options)

    def padded(flat: Tensor | None) -> Any:
        if flat is None:
            return None
        found = flat.split(lengths)
        return pad_sequence([found[place] for place in places], batch_first=True)

    return ResponseScores(*map(padded, (scored.logps, scored.values, scored.entropies, chosen)))


def join_rows(parts: Sequence[Tensor | None]) -> Any:
    """Concatenate tensors `(b, r, ...)` to `(B, R, ...)`, padded with 0; None stays None.

    >>> join_rows([torch.ones(1, 1), torch.ones(1, 2)])
    tensor([[1., 0.],
            [1., 1.]])
    """
    rows = [row for part in parts if part is not None for row in part]
    return pad_sequence(rows, batch_first=True) if rows else None


def shuffled_minibatches(rows: int, mini_batch_size: int, accumulation: int) -> Iterator[list[list[int]]]:
    """The minibatches of each optimiser step of one epoch, in an order from numpy's global generator."""
    order = np.random.permutation(rows).tolist()
    size = mini_batch_size * accumulation
    for begin in range(0, rows, size):
        step = order[begin : begin + size]
        yield [step[first : first + mini_batch_size] for first in range(0, len(step), mini_batch_size)]
