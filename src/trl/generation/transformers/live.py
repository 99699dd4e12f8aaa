"""Requests of a `TransformersEngine` that come and go between the steps of one running decode."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from trl.generation.engine import Generated, Sampling, check_requests, completion_limits
from trl.generation.live import Request, Scored
from trl.generation.transformers.cache import RolloutCache
from trl.generation.transformers.requests import Requests, Rules, fresh_seed
from trl.generation.transformers.rollout_loop import RolloutLoop

_LOGITS = 1 << 24  # of a prompt at once


class LiveRequests:
    """A `Live` engine over a `RolloutLoop`; see there.

    `rows_for()` is how many rows of the present requests may run at once, `running(cache)` is around each step.
    """

    def __init__(
        self, requests: Requests, loop: RolloutLoop, *, vocabulary: int, rules_of: Callable[[Sampling], Rules],
        rows_for: Callable[[], int], running: Callable[[RolloutCache], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        self.requests, self.loop, self.vocabulary = requests, loop, vocabulary
        self.rules_of, self.rows_for, self.running = rules_of, rows_for, running
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Request, Rules]] = {}
        self._running: dict[int, tuple[int, Request]] = {}  # by row
        self._rules: dict[Sampling, Rules] = {}
        requests.listener = self._newest

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self.loop.busy

    def submit(self, request: Request) -> int:
        length, sampling = self.requests.context_length, request.sampling
        prompt = self._checked(request.prompt)
        completion_limits([len(prompt)], sampling, length, None if request.limit is None else [request.limit])
        # What is given to each request alone does not tell apart how tokens are drawn.
        shared = replace(sampling, seed=None, max_new_tokens=None, max_length=None, min_new_tokens=0, min_length=0)
        if shared not in self._rules:
            self._rules[shared] = self.rules_of(shared)
        if sampling.seed is None:
            sampling = replace(sampling, seed=fresh_seed())
        number = next(self._numbers)
        self._waiting[number] = replace(request, prompt=prompt, sampling=sampling), self._rules[shared]
        return number

    def _checked(self, prompt: Sequence[int], room: int = 1) -> tuple[int, ...]:
        length, size = self.requests.context_length, self.vocabulary
        return check_requests([prompt], None, context_length=length, vocabulary=size, room=room)[0][0]

    def cancel(self, request: int) -> None:
        self._waiting.pop(request, None)
        for row in [row for row, (number, _) in self._running.items() if number == request]:
            self.loop.cancel(row)
            self._release(row)
            self.loop.ended.clear()

    def step(self) -> dict[int, Generated]:
        with self.running(self.loop.cache):
            self._begin()
            self.loop.advance()
        ended = self.loop.ended[:]
        self.loop.ended.clear()
        completions = self.requests.results(ended) if ended else []
        answers = {self._release(row): one for row, one in zip(ended, completions, strict=True)}
        if not self.busy:  # other settings would add up
            self._rules.clear()
            self.requests.forget_rules()
        return answers

    def prompt_logps(self, prompt: Sequence[int], count: int) -> list[Scored]:
        """Log-probs of a prompt's tokens but the first, and of the `count` most likely ones there.

        Raises: ValueError for an invalid prompt.
        """
        ids, decoder, places = self._checked(prompt, 0), copy.copy(self.loop.decoder), list[Scored]()
        decoder.cache = RolloutCache()
        with self.running(decoder.cache):
            hidden, _ = decoder.prompt_states([ids])
            targets = torch.tensor(ids[1:], device=hidden.device)
            rows = max(1, _LOGITS // self.vocabulary)
            for states, next_ids in zip(hidden[:-1].split(rows), targets.split(rows), strict=True):
                logits = decoder.logits(states)
                best, drawn = logits.topk(min(count, logits.shape[1])), logits.gather(1, next_ids[:, None])
                tokens = torch.cat([best.indices, next_ids[:, None]], 1).tolist()
                logps = (torch.cat([best.values, drawn], 1) - logits.logsumexp(1)[:, None]).tolist()
                ranks = ((logits > drawn).sum(1) + 1).tolist()
                for here, values, rank in zip(tokens, logps, ranks, strict=True):
                    places.append(list(zip(here, values, [*range(1, len(here)), rank], strict=True)))
        if self.loop.reuse is not None:  # of a completion after it
            self.loop.reuse.keep(ids, decoder.cache.copy_of(0, 0, 0, len(ids)))
        return places

    def _begin(self) -> None:
        """Add what waits; equal prompts of one step are run once."""
        alike: dict[tuple[Rules, Sampling, bool], list[tuple[int, Request]]] = {}
        for number, (request, rules) in self._waiting.items():
            alike.setdefault((rules, request.sampling, request.limit is None), []).append((number, request))
        self._waiting = {}
        for (rules, sampling, unlimited), several in alike.items():
            settings = [(request.prompt, request.stream, request.limit) for _, request in several]
            prompts, streams, limits = zip(*settings, strict=True)
            assert sampling.seed is not None  # `submit`
            limits = None if unlimited else limits
            rows = self.requests.add(prompts, streams, sampling, rules, seed=sampling.seed, limits=limits)
            self._running |= dict(zip(rows, several, strict=True))
            self.loop.queue += self.requests.queue(rows)
        if self.loop.queue:
            self.loop.max_rows = self.rows_for()

    def _release(self, row: int) -> int:
        """Forget a request in a row of the tables; its number."""
        self.requests.release(row)
        return self._running.pop(row)[0]

    def _newest(self, rows: Tensor, ids: Tensor) -> None:
        if any(request.listener is not None for _, request in self._running.values()):
            for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                if (listener := self._running[row][1].listener) is not None:
                    listener([token])
