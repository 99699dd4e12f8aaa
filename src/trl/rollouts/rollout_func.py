"""Completions of a user's rollout function as an `Experience`."""

import copy
import inspect
import math
import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import torch

from trl.data.prompts import PROMPT_IDS
from trl.data.rendering import Chat, Fields, Json, render_prompt, text_tokenizer
from trl.data.tokenization import encode_open
from trl.rollouts.experience import SAMPLING_LOGPS, STOPPED, Experience
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.rollouts.schedule import stream_of
from trl.tensors.ragged import Ragged

_ROUNDING = 1e-2  # by which log-probs of low precision may lie above 0
_KNOWN = ("prompt_ids", "completion_ids", "logprobs")


class RolloutFunction:
    """Completes prompts with a user's `function(prompts, trainer)`; reward functions are given its additional fields.

    Raises: TypeError or ValueError for an answer that `read_rollouts` refuses, with its `vocabulary` and
    `context_length`.
    """

    exact = False
    adds = None

    def __init__(self, function: Any, trainer: Any, **limits: int | None) -> None:
        self.function, self._trainer, self._limits = function, trainer, limits
        self._stream, self._asked = 0, Counter[tuple[int, ...]]()

    def next_streams(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """A random stream for a completion of each prompt: another one each time that a rollout asks for it."""
        streams = []
        for prompt in map(tuple, prompts):
            streams.append(stream_of(self._stream, prompt, self._asked[prompt]))
            self._asked[prompt] += 1
        return streams

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        self._stream, self._asked = streams[0], Counter()
        ids = rows[PROMPT_IDS]
        prompts = rows["prompt"] if "prompt" in rows else maker.tokenizer.batch_decode(list(ids))
        answer = self.function(copy.deepcopy(list(prompts)), self._trainer)
        ends = maker.sampling.stop_token_ids or ()
        return read_rollouts(answer, len(ids), end_tokens=ends, **self._limits)


def generate_rollout_completions(
    trainer: Any, prompts: Sequence[Any], *, generation_overrides: Fields | None = None, as_chat: bool | None = None
) -> list[Json]:
    """Completions of prompts by the trainer's engine, for a `rollout_func`.

    Prompts are texts or conversations (`as_chat`; None: as they are). `generation_overrides` change the trainer's
    sampling. Returns `prompt_ids`, `completion_ids`, `logprobs` (those of sampling) and `text` of each. Each call draws
    anew.

    Raises: ValueError for prompts of the other kind, and for unsupported settings.
    """
    maker, tokenizer = trainer.rollouts, trainer.processing_class
    chats = [not isinstance(prompt, str) for prompt in prompts]
    if any(is_chat != (chats[0] if as_chat is None else as_chat) for is_chat in chats):
        raise ValueError(f"prompts must be all texts or all conversations (as_chat={as_chat}). Change them.")
    kwargs = trainer.args.chat_template_kwargs or {}
    texts = [
        prompt if isinstance(prompt, str) else render_prompt(tokenizer, Chat(list(prompt), None, kwargs))
        for prompt in prompts
    ]
    opened = encode_open(text_tokenizer(tokenizer), texts, add_special_tokens=not any(chats))
    ids = [list(prompt_tokens) for prompt_tokens, _ in opened]
    overrides = dict(generation_overrides or {})
    if "max_tokens" in overrides:  # vLLM's name
        overrides["max_new_tokens"] = overrides.pop("max_tokens")
    completer = maker.completer
    streams = completer.next_streams(ids) if isinstance(completer, RolloutFunction) else None
    with maker.accelerator.autocast():
        completions = maker.engine.generate(ids, maker.sampling.updated(overrides), streams=streams)
    return [
        {
            "prompt_ids": prompt,
            "completion_ids": list(one.ids),
            "logprobs": one.logps.tolist(),
            "text": maker.tokenizer.decode(one.ids, skip_special_tokens=True),
        }
        for prompt, one in zip(ids, completions, strict=True)
    ]


def check_rollout_func(function: Any) -> None:
    """Raise TypeError for a rollout function that cannot be called with prompts and the trainer."""
    with suppress(ValueError):  # some builtins have no signature
        try:
            inspect.signature(function).bind([], None)
        except TypeError as error:
            raise TypeError(f"rollout_func must be a function of (prompts, trainer): {error}.") from None


def read_rollouts(
    answer: Any,
    count: int,
    *,
    end_tokens: Collection[int],
    vocabulary: int | None = None,
    context_length: int | None = None,
) -> Completed:
    """The result of a rollout function for `count` prompts: `prompt_ids`, `completion_ids`, optionally `logprobs` of
    the completions' tokens, and further fields. A completion whose last token is one of `end_tokens` has stopped.

    Raises: TypeError or ValueError for fields that are no lists, another number of rows or log-probs, token ids that
    are not below `vocabulary`, more than `context_length` tokens in a row, and log-probs above 0.
    """
    if not isinstance(answer, Mapping) or not {"prompt_ids", "completion_ids"} <= answer.keys():
        shown = sorted(answer) if isinstance(answer, Mapping) else type(answer).__name__
        raise TypeError(f"rollout_func must return 'prompt_ids' and 'completion_ids' in a dict, got {shown}.")
    fields = {name: _listed(name, values) for name, values in answer.items() if values is not None}
    for name, values in fields.items():
        if len(values) != count:
            raise ValueError(f"rollout_func must return {count} {name}, one per prompt, got {len(values)}.")
    prompts, completions = (
        [_ids(name, row, ids, vocabulary) for row, ids in enumerate(fields[name])]
        for name in ("prompt_ids", "completion_ids")
    )
    for row, tokens in enumerate(map(len, map(operator.add, prompts, completions))):
        if context_length is not None and tokens > context_length:
            raise ValueError(
                f"rollout_func returned {tokens} tokens in row {row}, more than the context length {context_length}."
            )
    columns = {SAMPLING_LOGPS: _logps(fields["logprobs"], completions)} if "logprobs" in fields else {}
    stopped = torch.tensor([ids[-1] in end_tokens for ids in completions])
    experience = Experience(Ragged.of(prompts), Ragged.of(completions), columns, {STOPPED: stopped})
    return Completed(experience, {name: values for name, values in fields.items() if name not in _KNOWN})


def _listed(name: str, values: Any) -> list[Any]:
    try:
        items = iter(values)
    except TypeError:
        raise TypeError(f"rollout_func must return a list as {name}, got {type(values).__name__}.") from None
    return list(items)


def _ids(name: str, row: int, tokens: Any, vocabulary: int | None) -> list[int]:
    ids = _listed(f"row {row} of {name}", tokens.tolist() if hasattr(tokens, "tolist") else tokens)
    most = math.inf if vocabulary is None else vocabulary - 1
    wrong = [token for token in ids if not (isinstance(token, Integral) and 0 <= int(token) <= most)]
    if wrong or not ids:
        raise ValueError(
            f"rollout_func returned {repr(wrong[0]) if wrong else 'nothing'} in {name} of row {row}, "
            f"expected ids from 0 to {most}."
        )
    return [int(token) for token in ids]


def _logps(rows: Sequence[Any], completions: Sequence[Sequence[int]]) -> torch.Tensor:
    for row, (logps, ids) in enumerate(zip(rows, completions, strict=True)):
        if (count := len(_listed(f"row {row} of logprobs", logps))) != len(ids):
            raise ValueError(f"rollout_func returned {count} logprobs for {len(ids)} tokens in row {row}.")
        if getattr(logps, "ndim", 1) != 1 or any(isinstance(logp, (list, tuple)) for logp in logps):
            raise ValueError(f"rollout_func returned lists in logprobs of row {row}, expected a number for each token.")
    values = Ragged.of(rows, dtype=torch.float32).values
    wrong = values[~((values <= _ROUNDING) & values.isfinite())]
    if len(wrong):
        raise ValueError(f"rollout_func must return finite logprobs <= 0, or none, got {float(wrong[0]):g}.")
    return values
