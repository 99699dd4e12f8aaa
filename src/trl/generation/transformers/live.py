"""Requests of a `TransformersEngine` that come and go between the steps of one running decode."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trl.generation.engine import Generated, Sampling, check_requests, completion_limits
from trl.generation.live import Request, Scored
from trl.generation.transformers.cache import RolloutCache
from trl.generation.transformers.requests import Requests, Rules, fresh_seed
from trl.generation.transformers.rollout_loop import RolloutLoop

_LOGITS = 1 << 24  # of a prompt at once


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request with its number; `sampling` has a seed, `prompt` was checked."""

    number: int
    request: Request
    prompt: tuple[int, ...]
    sampling: Sampling
    rules: Rules


class LiveRequests:
    """A `Live` engine over a `RolloutLoop`; see there.

    `rows_for()` is how many rows may run at once with the present requests. `attention(cache)` and `autocast()` are entered around
    each step.
    """

    def __init__(
        self,
        requests: Requests,
        loop: RolloutLoop,
        *,
        vocabulary: int,
        rules_of: Callable[[Sampling], Rules],
        rows_for: Callable[[], int],
        attention: Callable[[RolloutCache], AbstractContextManager[Any]],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.requests, self.loop, self.vocabulary = requests, loop, vocabulary
        self.rules_of, self.rows_for, self.attention, self.autocast = rules_of, rows_for, attention, autocast
        self._numbers = itertools.count()
        self._waiting: dict[int, Waiting] = {}
        self._row_of: dict[int, int] = {}
        self._running: dict[int, Waiting] = {}  # by row
        self._rules: dict[Sampling, Rules] = {}
        requests.listener = self._newest

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self.loop.busy

    def submit(self, request: Request) -> int:
        length, sampling = self.requests.context_length, request.sampling
        (found,), _ = check_requests(
            [request.prompt], None, context_length=length, vocabulary=self.vocabulary
        )
        completion_limits([len(found)], sampling, length, None if request.limit is None else [request.limit])
        # What is given to each request alone does not tell apart how tokens are drawn.
        shared = replace(
            sampling, seed=None, max_new_tokens=None, max_length=None, min_new_tokens=0, min_length=0
        )
        if shared not in self._rules:
            self._rules[shared] = self.rules_of(shared)
        if sampling.seed is None:
            sampling = replace(sampling, seed=fresh_seed())
        number = next(self._numbers)
        self._waiting[number] = Waiting(number, request, found, sampling, self._rules[shared])
        return number

    def cancel(self, request: int) -> None:
        if self._waiting.pop(request, None) is None and (row := self._row_of.get(request)) is not None:
            self.loop.cancel(row)
            self._release(row)
            self.loop.ended.clear()

    def step(self) -> dict[int, Generated]:
        with self._running_model(self.loop.cache):
            self._begin()
            self.loop.advance()
        ended = self.loop.ended[:]
        self.loop.ended.clear()
        found = self.requests.results(ended) if ended else []
        answers = {self._release(row): one for row, one in zip(ended, found, strict=True)}
        if not self.busy:  # other settings would add up
            self._rules.clear()
            self.requests.forget_rules()
        return answers

    def prompt_logps(self, prompt: Sequence[int], count: int) -> list[Scored]:
        """Log-probs of a prompt's tokens but the first, and of the `count` most likely ones there.

        Raises: ValueError for an invalid prompt.
        """
        length = self.requests.context_length
        (ids,), _ = check_requests([prompt], None, context_length=length, vocabulary=self.vocabulary, room=0)
        decoder, found = copy.copy(self.loop.decoder), list[Scored]()
        decoder.cache = RolloutCache(len(self.loop.cache.layers))
        with self._running_model(decoder.cache):
            hidden, _ = decoder.prompt_states([ids])
            targets = torch.tensor(ids[1:], device=hidden.device)
            rows = max(1, _LOGITS // self.vocabulary)
            for states, own in zip(hidden[:-1].split(rows), targets.split(rows), strict=True):
                logits = decoder.logits(states)
                best, drawn = logits.topk(min(count, logits.shape[1])), logits.gather(1, own[:, None])
                tokens = torch.cat([best.indices, own[:, None]], 1).tolist()
                logps = (torch.cat([best.values, drawn], 1) - logits.logsumexp(1)[:, None]).tolist()
                for *place, rank in zip(tokens, logps, ((logits > drawn).sum(1) + 1).tolist(), strict=True):
                    found.append(list(zip(*place, [*range(1, len(place[0])), rank], strict=True)))
        if self.loop.reuse is not None:  # of a completion after it
            self.loop.reuse.keep(ids, decoder.cache.copy_of(0, 0, 0, len(ids)))
        return found

    @contextmanager
    def _running_model(self, cache: RolloutCache) -> Iterator[None]:
        with torch.no_grad(), self.attention(cache), self.autocast():
            yield

    def _begin(self) -> None:
        """Add what waits; equal prompts of one step are run once."""
        alike: dict[tuple[Rules, Sampling, bool], list[Waiting]] = {}
        for each in self._waiting.values():
            alike.setdefault((each.rules, each.sampling, each.request.limit is None), []).append(each)
        self._waiting = {}
        for (rules, sampling, unlimited), several in alike.items():
            limits = [each.request.limit for each in several if each.request.limit is not None]
            rows = self.requests.add(
                [each.prompt for each in several], [each.request.stream for each in several], sampling, rules,
                limits=None if unlimited else limits,
            )  # fmt: skip
            for row, each in zip(rows, several, strict=True):
                self._row_of[each.number], self._running[row] = row, each
            self.loop.queue += self.requests.queue(rows)
        if self.loop.queue:
            self.loop.max_rows = self.rows_for()

    def _release(self, row: int) -> int:
        """Forget a request in a row of the tables; its number."""
        number = self._running.pop(row).number
        del self._row_of[number]
        self.requests.release(row)
        return number

    def _newest(self, rows: Tensor, ids: Tensor) -> None:
        if any(each.request.listener is not None for each in self._running.values()):
            for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                if (listener := self._running[row].request.listener) is not None:
                    listener([token])
