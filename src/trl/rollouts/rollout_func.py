"""Completions that a user's own function makes, as an `Experience`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trl.rollouts.experience import Experience
from trl.rollouts.sampling import SAMPLING_LOGPS, STOPPED
from trl.tensors.ragged import Ragged

_KNOWN = ("prompt_ids", "completion_ids", "logprobs")


class Rollouts(NamedTuple):
    """What a rollout function made, and the further fields that it gives to reward functions, one value per row."""

    experience: Experience
    fields: dict[str, list[Any]]


def read_rollouts(found: Any, count: int, *, end_tokens: Collection[int]) -> Rollouts:
    """The answer of a rollout function for `count` prompts: `prompt_ids`, `completion_ids`, perhaps `logprobs` of the
    completions' tokens, and further fields. A completion whose last token is one of `end_tokens` has stopped.

    Raises: TypeError or ValueError for an answer that is none, or has another number of rows or log-probs.
    """
    if not isinstance(found, Mapping) or not {"prompt_ids", "completion_ids"} <= found.keys():
        given = sorted(found) if isinstance(found, Mapping) else type(found).__name__
        raise TypeError(
            f"rollout_func returned {given}, expected a dict with 'prompt_ids' and 'completion_ids'. Give a list of token ids "
            "for every prompt in each."
        )
    given = {name: list(values) for name, values in found.items() if values is not None}
    for name, values in given.items():
        if len(values) != count:
            raise ValueError(
                f"rollout_func returned {len(values)} {name} for {count} prompts, expected one for each. Prompts come once for "
                "each completion that is wanted."
            )
    completions = [_ids(row) for row in given["completion_ids"]]
    for row, ids in enumerate(completions):
        if not ids:
            raise ValueError(
                f"rollout_func returned an empty completion in row {row}, expected at least 1 token. Give the end token."
            )
    columns = {SAMPLING_LOGPS: _logps(given["logprobs"], completions)} if "logprobs" in given else {}
    stopped = torch.tensor([ids[-1] in end_tokens for ids in completions])
    prompts = Ragged.of([_ids(row) for row in given["prompt_ids"]])
    experience = Experience(prompts, Ragged.of(completions), columns, {STOPPED: stopped})
    return Rollouts(experience, {name: values for name, values in given.items() if name not in _KNOWN})


def _ids(row: Any) -> list[int]:
    return row.tolist() if isinstance(row, torch.Tensor) else [int(token) for token in row]


def _logps(rows: Sequence[Any], completions: Sequence[Sequence[int]]) -> torch.Tensor:
    for row, (logps, ids) in enumerate(zip(rows, completions, strict=True)):
        if len(logps) != len(ids):
            raise ValueError(
                f"rollout_func returned {len(logps)} logprobs for the {len(ids)} tokens of completion {row}. Give one for each "
                "token, or none at all."
            )
    return Ragged.of(rows, dtype=torch.float32).values
