"""The requests of one call as tensors: their limits, random streams and results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl.generation.engine import Generated, Sampling, completion_limits
from trl.generation.transformers.choosing import Chosen, Processors, choose, penalise_
from trl.generation.transformers.stopping import StopRule, StopStrings

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def _signed(word: int) -> int:
    """A 64-bit word as torch's int64 holds it."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


_FIRST, _SECOND, _INCREMENT = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB), _signed(_STEP)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(words: Tensor) -> Tensor:
    """The output function of SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195, figure 14)."""
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


def rng_stream_keys(seed: int, streams: Sequence[int]) -> Tensor:
    """The key of each random stream, int64 `(N,)`; streams of different seeds are independent."""
    start = _mixed(torch.tensor([_signed(seed * _STEP + _STEP)]))
    names = torch.tensor([_signed(stream) for stream in streams], dtype=torch.int64)
    return _mixed(_mixed(start + names * _INCREMENT) ^ start)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Number `positions[i]` of stream `keys[i]`, uniform in [0, 1): float64 of their shape.

    >>> keys = rng_stream_keys(7, [0, 1])
    >>> bool(torch.equal(uniforms(keys, torch.tensor([5, 5]))[:1], uniforms(keys[:1], torch.tensor([5]))))
    True
    """
    words = _mixed(keys + (positions + 1) * _INCREMENT)
    return _shifted(words, 11).double() * 2.0**-53


class Requests:
    """The requests of one call and their completions so far.

    `prompts` are the distinct prompts in order of first appearance, `prompt_of[i]` the index of request i's prompt. `begin` are
    the tokens that an encoder-decoder's completions begin with, None for a decoder. `limits` are further maxima of new tokens of
    each request. `processors` replace the distribution settings of `sampling`.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        streams: Sequence[int],
        sampling: Sampling,
        *,
        context_length: int | None,
        ends: Sequence[int],
        strings: StopStrings | None,
        device: torch.device,
        begin: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        processors: Processors | None = None,
    ) -> None:
        self.sampling, self.processors, self.device = sampling, processors, device
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        self.prompts = list(numbers)
        self.prompt_of = [numbers[prompt] for prompt in prompts]
        starts = [len(prompt if begin is None else begin) for prompt in prompts]
        self.limits = completion_limits(starts, sampling, context_length, limits)
        self.longest = max(self.limits)
        self.stops = StopRule(self._tensor(self.limits), self._tensor(ends), strings)
        self.keys = rng_stream_keys(fresh_seed() if sampling.seed is None else sampling.seed, streams).to(
            device
        )
        minima = [max(sampling.min_new_tokens, sampling.min_length - start) for start in starts]
        self.minima = self._tensor(minima) if max(minima) > 0 else None
        self.begin = begin
        self.listener: Callable[[Tensor, Tensor], None] | None = None
        self.ids = torch.zeros(len(prompts), self.longest, dtype=torch.int64, device=device)
        self.logps: Tensor | None = None
        self.kept: Tensor | None = None
        self._seen_by: Tensor | None = None
        self.counts = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        self.stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self.device)

    def queue(self) -> deque[int]:
        """Request indices: long prompts first, copies of a prompt together."""
        key = [(-len(self.prompts[number]), number) for number in self.prompt_of]
        return deque(sorted(range(len(key)), key=key.__getitem__))

    def extend(self, requests: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of each of the `requests` `(R,)` from its `logits` `(R, V)`, which are overwritten.

        Returns the tokens and, bool, which requests end with them.

        Raises: FloatingPointError for logits that are not finite.
        """
        counts = self.counts[requests]
        self._penalise(requests, counts, logits)
        numbers = uniforms(self.keys[requests], counts)
        if self.processors is None:
            drawn = choose(logits, numbers, self.sampling)
        else:
            starts = [self.prompts[self.prompt_of[request]] for request in requests.tolist()]
            drawn = self.processors.choose(logits, numbers, starts, self.begin, self.ids[requests], counts)
        if not bool((finite := torch.isfinite(drawn.logps)).all()):
            row = int((~finite).nonzero()[0, 0])
            raise FloatingPointError(
                f"logits must be finite, got NaN or infinity for prompts[{int(requests[row])}] at completion token "
                f"{int(counts[row])}. Look for diverged weights, or use a wider dtype than float16."
            )
        self._write(requests, counts, drawn)
        if self.listener is not None:
            self.listener(requests, drawn.ids)
        self.counts[requests] = counts + 1
        done, stopped = self.stops.done(drawn.ids, requests, counts + 1, self.ids)
        self.stopped[requests] = stopped
        return drawn.ids, done

    def _penalise(self, requests: Tensor, counts: Tensor, logits: Tensor) -> None:
        """Apply the repetition penalty and the minimum length, in place."""
        if self.sampling.repetition_penalty != 1.0 and self.processors is None:
            penalise_(logits, self._seen(requests, logits.shape[1]), self.sampling.repetition_penalty)
        if self.minima is not None and len(self.stops.ends):
            early = (counts < self.minima[requests]).nonzero()[:, 0]
            ends = self.stops.ends[self.stops.ends < logits.shape[1]]
            logits[early[:, None], ends] = -torch.inf

    def _seen(self, requests: Tensor, vocabulary: int) -> Tensor:
        """Bool `(R, V)`: tokens of each request's prompt and completion."""
        if self._seen_by is None:
            self._seen_by = torch.zeros(len(self.keys), vocabulary, dtype=torch.bool, device=self.device)
            for request, prompt in enumerate(self.prompt_of):
                self._seen_by[request, self._tensor(self.begin or self.prompts[prompt])] = True
        return self._seen_by[requests]

    def _write(self, requests: Tensor, counts: Tensor, drawn: Chosen) -> None:
        if self.logps is None:
            self.logps = torch.zeros(self.ids.shape, dtype=drawn.logps.dtype, device=self.device)
            self.kept = None if drawn.kept is None else torch.zeros_like(self.logps)
        self.ids[requests, counts] = drawn.ids
        self.logps[requests, counts] = drawn.logps
        if self.kept is not None and drawn.kept is not None:
            self.kept[requests, counts] = drawn.kept
        if self._seen_by is not None:
            self._seen_by[requests, drawn.ids] = True

    def results(self) -> list[Generated]:
        """The completions, in the order of the requests."""
        assert self.logps is not None
        ids, logps = self.ids.tolist(), self.logps.cpu()
        kept = None if self.kept is None else self.kept.cpu()
        found = []
        for row, (count, stopped) in enumerate(zip(self.counts.tolist(), self.stopped.tolist(), strict=True)):
            own = None if kept is None else kept[row, :count].clone()
            reason: Any = "stop" if stopped else "length"
            found.append(Generated(ids[row][:count], logps[row, :count].clone(), own, reason))
        return found


def fresh_seed() -> int:
    """A seed from torch's global generator."""
    return int(torch.randint(2**62, ()))
