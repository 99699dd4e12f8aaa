"""Continuous batching: finished rows leave the batch, and waiting requests take their places."""

from __future__ import annotations

import os
from collections import deque

import torch
from torch import Tensor

from trl.generation.transformers.cache import RolloutCache
from trl.generation.transformers.decoders import OwnForward
from trl.generation.transformers.requests import Requests
from trl.generation.transformers.reuse import Held, Reuse
from trl.generation.transformers.steps import Moves, Step
from trl.reporting.run_lines import long_bar

PREFILL_TOKENS = 8192  # of prompts that are prefilled in one packed row
_MOST_ROWS = 512
_REFILL_SHARE = 4  # new rows enter when a quarter of the places is free, because small prefills are slow


class RolloutLoop:
    """Runs requests through a decoder and its cache, at most `max_rows` at once.

    With `reuse`, keys and values of ended requests are kept there, for prompts that begin with the same tokens.
    """

    def __init__(
        self, decoder: OwnForward, cache: RolloutCache, requests: Requests, *, max_rows: int, reuse: Reuse | None = None
    ) -> None:
        self.decoder, self.cache, self.requests = decoder, cache, requests
        self.max_rows, self.reuse = max_rows, reuse
        self.queue: deque[int] = requests.queue()
        self.ended: list[int] = []  # requests that ended since this was last emptied
        empty = torch.zeros(0, dtype=torch.int64, device=requests.device)
        self.request = self.prompt = self.token = empty  # by place of the row
        self.lengths = empty  # by place of the prompt
        self.place_of: dict[int, int] = {}  # prompt -> its place
        self.firsts: dict[int, Tensor] = {}  # prompt -> logits after its last token

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.queue) or len(self.request) > 0

    def run(self) -> None:
        """Run until every request is done; several have a bar on a terminal."""
        several = len(self.queue) > 1 and int(os.environ.get("LOCAL_RANK", 0)) <= 0
        with long_bar((), "generating", several, total=len(self.queue)) as bar:
            while self.busy:
                self.advance()
                bar.update(len(self.ended) - bar.n)

    def advance(self) -> None:
        """Admit waiting requests where there is room, and draw a token for every row."""
        running = len(self.request)
        free = self.max_rows - running
        if self.queue and free >= min(len(self.queue), max(1, self.max_rows // _REFILL_SHARE)):
            wanted = running + len(self.queue)
            self.cache.capacity = min(2 * wanted if running else wanted, self.max_rows)
            self.cache.most_columns = max(self.requests.limits.values())
            self._admit()
        if len(self.request):
            if self.cache.step is None:
                columns = self.requests.counts[self.request] - 1
                self.cache.step = Step(columns, self.prompt, self.lengths)
            step = self.cache.step
            logits = self.decoder.decode(self.token, self.lengths[self.prompt] + step.columns)
            self.token, done = self.requests.extend(self.request, logits)
            step.advance()
            self._finish(done)

    def cancel(self, request: int) -> None:
        """Take a request out, whether it waits or runs."""
        if request in self.queue:
            self.queue.remove(request)
        else:
            self._finish(self.request == request)

    def _admit(self) -> None:
        """Prefill the next requests' prompts, a packed row of them at a time, and draw their first tokens."""
        while self.queue and len(self.request) < self.max_rows:
            arriving, new = self._next_requests()
            lengths = [len(self.requests.prompts[number]) for number in new]
            first = len(self.lengths)
            self.place_of.update({number: first + index for index, number in enumerate(new)})
            if new:
                prompts = [self.requests.prompts[number] for number in new]
                logits = self.decoder.prefill(prompts, list(new.values()))
                self.firsts.update(zip(new, logits, strict=True))
                self.lengths = torch.cat([self.lengths, self.lengths.new_tensor(lengths)])
            numbers = [self.requests.prompt_of[request] for request in arriving]
            logits = torch.stack([self.firsts[number] for number in numbers])
            waiting = self.requests.prompt_of[self.queue[0]] if self.queue else None  # its prompt is kept
            self.firsts = {number: row for number, row in self.firsts.items() if number == waiting}
            entering = self.request.new_tensor(arriving)
            tokens, done = self.requests.extend(entering, logits)
            done = torch.cat([torch.zeros(len(self.request), dtype=torch.bool, device=done.device), done])
            self.request = torch.cat([self.request, entering])
            places = self.prompt.new_tensor([self.place_of[number] for number in numbers])
            self.prompt = torch.cat([self.prompt, places])
            self.token = torch.cat([self.token, tokens])
            self.cache.step = None
            self._finish(done)

    def _next_requests(self) -> tuple[list[int], dict[int, Held | None]]:
        """The next requests that fit, and those of their prompts that are not cached yet, with what is held of each."""
        arriving: list[int] = []
        new: dict[int, Held | None] = {}
        tokens = 0
        while self.queue and len(self.request) + len(arriving) < self.max_rows:
            number = self.requests.prompt_of[self.queue[0]]
            if number not in self.place_of and number not in new:
                prompt = self.requests.prompts[number]
                held = None if self.reuse is None else self.reuse.longest(prompt)
                tokens += len(prompt) - (0 if held is None else held.length)
                if new and tokens > PREFILL_TOKENS:
                    break
                new[number] = held
            arriving.append(self.queue.popleft())
        return arriving, new

    def _finish(self, done: Tensor) -> None:
        """Remove rows that are done, and prompts that no row or waiting request needs."""
        if not bool(done.any()):
            return
        width = int(self.requests.counts[self.request].max())
        self.ended += self.request[done].tolist()
        if self.reuse is not None:
            self._keep(self.reuse, done)
        moves = Moves(~done)
        self.cache.drop_rows(moves, width)
        self.request, self.prompt, self.token = (
            state[moves.order] for state in (self.request, self.prompt, self.token)
        )
        self.cache.step = None
        needed = torch.bincount(self.prompt, minlength=len(self.lengths)) > 0
        if self.queue and (waiting := self.place_of.get(self.requests.prompt_of[self.queue[0]])) is not None:
            needed[waiting] = True
        if bool(needed.all()):
            return
        moves = Moves(needed)
        self.cache.drop_prompts(moves)
        place = torch.arange(len(needed), device=needed.device)
        place[moves.source] = moves.target
        self.lengths = self.lengths[moves.order]
        self.prompt = place[self.prompt]
        kept, places = needed.tolist(), place.tolist()
        self.place_of = {number: places[at] for number, at in self.place_of.items() if kept[at]}

    def _keep(self, reuse: Reuse, done: Tensor) -> None:
        """Keep all tokens of rows but the newest one, which has not been run."""
        for row in done.nonzero()[:, 0].tolist():
            request, place = int(self.request[row]), int(self.prompt[row])
            prompt = self.requests.prompts[self.requests.prompt_of[request]]
            tokens = int(self.requests.counts[request]) - 1
            ids = [*prompt, *self.requests.ids[request, :tokens].tolist()]
            reuse.keep(ids, self.cache.copy_of(row, tokens, place, len(prompt)))


def row_memory(device: torch.device) -> int:
    """Bytes for rows: 2 GiB on a CPU, or half of a GPU's free memory."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2 << 30


def default_rows(
    requests: Requests, *, vocabulary: int, token_bytes: int, row_bytes: int = 0, memory: int | None = None
) -> int:
    """The number of rows that are decoded at once, at most 512: what fits in the `memory` (default: `row_memory`).

    A row needs `row_bytes`, `token_bytes` for each of its tokens and of its share of the prompts, and three rows of
    logits.
    """
    prompts = len(requests.prompts) * max(map(len, requests.prompts.values()))  # in one table
    tokens = max(requests.limits.values()) + prompts // len(requests.prompt_of)
    budget = row_memory(requests.device) if memory is None else memory
    return max(1, min(_MOST_ROWS, budget // (row_bytes + token_bytes * tokens + 12 * vocabulary)))
