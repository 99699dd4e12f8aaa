"""Completions of a user's rollout function as an `Experience`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from trl.data.prompts import PROMPT_IDS
from trl.rollouts.columns import SAMPLING_LOGPS, STOPPED
from trl.rollouts.experience import Experience
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.tensors.ragged import Ragged

_ROUNDING = 1e-2  # by which log-probs of low precision may lie above 0
_KNOWN = ("prompt_ids", "completion_ids", "logprobs")


class RolloutFunction:
    """Completes prompts with a user's `function(prompts, trainer)`; reward functions are given its additional fields.

    Raises: TypeError or ValueError for an answer that `read_rollouts` refuses, with its `vocabulary` and `context_length`.
    """

    exact = False

    def __init__(
        self, function: Any, trainer: Any, *, vocabulary: int | None, context_length: int | None
    ) -> None:
        self.function, self._trainer = function, trainer
        self._limits = {"vocabulary": vocabulary, "context_length": context_length}

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        ids: Any = rows[PROMPT_IDS]
        prompts = rows["prompt"] if "prompt" in rows else maker.tokenizer.batch_decode(list(ids))
        answer = self.function(list(prompts), self._trainer)
        ends = maker.sampling.stop_token_ids or ()
        return read_rollouts(answer, len(ids), end_tokens=ends, **self._limits)


def check_rollout_func(function: Any) -> None:
    """Raise TypeError for a rollout function that cannot be called with prompts and the trainer."""
    if not callable(function):
        raise TypeError(
            f"rollout_func is a {type(function).__name__}, expected a function of (prompts, trainer)."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind([], None)
    except TypeError as error:
        raise TypeError(
            f"rollout_func has the parameters {signature}, expected (prompts, trainer): {error}. The trainer has args, "
            "processing_class and model."
        ) from None


def read_rollouts(
    found: Any,
    count: int,
    *,
    end_tokens: Collection[int],
    vocabulary: int | None = None,
    context_length: int | None = None,
) -> Completed:
    """The result of a rollout function for `count` prompts: `prompt_ids`, `completion_ids`, optionally `logprobs` of the
    completions' tokens, and further fields. A completion whose last token is one of `end_tokens` has stopped.

    Raises: TypeError or ValueError for an answer that is none, has another number of rows or log-probs, token ids that are not
    below `vocabulary`, more than `context_length` tokens in a row, or log-probs that are none.
    """
    if not isinstance(found, Mapping) or not {"prompt_ids", "completion_ids"} <= found.keys():
        given = sorted(found) if isinstance(found, Mapping) else type(found).__name__
        raise TypeError(
            f"rollout_func returned {given}, expected a dict with 'prompt_ids' and 'completion_ids'. Give a list of token ids "
            "for every prompt in each."
        )
    given = {name: _rows(name, values, count) for name, values in found.items() if values is not None}
    prompts, completions = (
        [_ids(name, row, ids, vocabulary) for row, ids in enumerate(given[name])]
        for name in ("prompt_ids", "completion_ids")
    )
    for row, length in enumerate(
        len(ids) + len(more) for ids, more in zip(prompts, completions, strict=True)
    ):
        if context_length is not None and length > context_length:
            raise ValueError(
                f"rollout_func returned {length} tokens of prompt and completion in row {row}, expected at most {context_length}, the "
                "model's context_length. Cut the completion."
            )
    columns = {SAMPLING_LOGPS: _logps(given["logprobs"], completions)} if "logprobs" in given else {}
    stopped = torch.tensor([ids[-1] in end_tokens for ids in completions])
    experience = Experience(Ragged.of(prompts), Ragged.of(completions), columns, {STOPPED: stopped})
    return Completed(experience, {name: values for name, values in given.items() if name not in _KNOWN})


def _rows(name: str, values: Any, count: int) -> list[Any]:
    try:
        rows = list(values)
    except TypeError:
        raise TypeError(
            f"rollout_func returned {name} of type {type(values).__name__}, expected a list with one value for each of {count} "
            "prompts. Repeat what is the same for all."
        ) from None
    if len(rows) != count:
        raise ValueError(
            f"rollout_func returned {len(rows)} {name} for {count} prompts, expected one for each. Prompts come once for each "
            "completion that is wanted."
        )
    return rows


def _ids(name: str, row: int, given: Any, vocabulary: int | None) -> list[int]:
    ids = given.tolist() if hasattr(given, "tolist") else list(given)
    if not ids:
        kind = name.removesuffix("_ids")
        raise ValueError(
            f"rollout_func returned an empty {kind} in row {row}, expected at least 1 token. Give the "
            f"{'end' if kind == 'completion' else 'beginning-of-text'} token."
        )
    known = [int(token) if isinstance(token, Integral) else -1 for token in ids]
    for token, number in zip(ids, known, strict=True):
        if number < 0 or (vocabulary is not None and number >= vocabulary):
            most = "" if vocabulary is None else f" to {vocabulary - 1}"
            raise ValueError(
                f"rollout_func returned {token!r} in {name} of row {row}, expected token ids from 0{most}. Tokenize with the "
                "policy's tokenizer."
            )
    return known


def _logps(rows: Sequence[Any], completions: Sequence[Sequence[int]]) -> torch.Tensor:
    for row, (logps, ids) in enumerate(zip(rows, completions, strict=True)):
        if len(logps) != len(ids):
            raise ValueError(
                f"rollout_func returned {len(logps)} logprobs for the {len(ids)} tokens of completion {row}. Give one for each "
                "token, or none at all."
            )
    found = Ragged.of(rows, dtype=torch.float32).values
    if not ((found <= _ROUNDING) & found.isfinite()).all():
        wrong = found[~((found <= _ROUNDING) & found.isfinite())][0]
        raise ValueError(
            f"rollout_func returned the log-prob {float(wrong):g}, expected finite numbers <= 0, in nats. Give the logarithms of "
            "the probabilities with which the tokens were drawn, or leave logprobs out."
        )
    return found
