"""The requests of one call as tensors: their limits, stop strings, random streams and results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl.generation.engine import Generated, Sampling, completion_limits
from trl.generation.transformers.choosing import Processors, choose, penalise_
from trl.models.parts import causal_core

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MARGIN = 4  # more tokens than the longest stop string needs: decoded first, a token may lose its space


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


class StopStrings:
    """Finds stop strings in completions, also across token borders.

    A stop string counts if its last character came with the newest token; prompts are not searched.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, vocabulary: int) -> None:
        if tokenizer is None:
            raise ValueError(
                f"stop_strings {list(texts)} need a tokenizer, got None. Pass one, or use stop_token_ids."
            )
        self.texts, self.tokenizer = tuple(texts), tokenizer
        self.span = max(len(text.encode()) for text in texts) + _MARGIN
        lasts = {text[-1] for text in texts} | {"\ufffd"}  # the latter for a part of a character
        found = tokenizer.batch_decode([[token] for token in range(vocabulary)], skip_special_tokens=False)
        loses_spaces = any(text[-1].isspace() for text in texts)  # tokens decoded alone may
        # Bool `(V,)`: tokens that may complete a stop string.
        self.may_end = torch.tensor([loses_spaces or not lasts.isdisjoint(text) for text in found])

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether the newest of a completion's `ids` completed a stop string."""
        tail = list(ids[-self.span :])
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text, before = (self.tokenizer.decode(part, **options) for part in (tail, tail[:-1]))
        return any(
            stop in text and (stop not in before or text.rfind(stop) + len(stop) > len(before))
            for stop in self.texts
        )


class Requests:
    """The requests of one call and their completions so far.

    `prompts` are the distinct prompts in order of first appearance, `prompt_of[i]` the index of request i's prompt. `begin` are
    the tokens that an encoder-decoder's completions begin with, None for a decoder. `limits` are further maxima of new tokens of
    each request. `processors` replace the distribution settings of `sampling`. `listener(requests, ids)`, both `(R,)`, is called
    with the newest tokens.
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
        listener: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self.sampling, self.processors, self.listener, self.device = sampling, processors, listener, device
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        self.prompts, self.begin = list(numbers), begin
        self.prompt_of = [numbers[prompt] for prompt in prompts]
        starts = [len(prompt if begin is None else begin) for prompt in prompts]
        self.limits = completion_limits(starts, sampling, context_length, limits)
        self.longest, self._limits = max(self.limits), self._tensor(self.limits)
        self.ends, self.strings = self._tensor(ends), strings
        self._may_end = None if strings is None else strings.may_end.to(device)
        assert sampling.seed is not None
        self.keys = rng_stream_keys(sampling.seed, streams).to(device)
        minima = [max(sampling.min_new_tokens, sampling.min_length - start) for start in starts]
        self.minima = self._tensor(minima) if max(minima) > 0 and len(self.ends) else None
        self.ids = torch.zeros(len(prompts), self.longest, dtype=torch.int64, device=device)
        self.logps: Tensor | None = None
        self.kept: Tensor | None = None
        self._seen: Tensor | None = None  # bool `(N, V)`: tokens of each request's prompt and completion
        self.counts = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        self.stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self.device)

    def prompt_length(self, request: int) -> int:
        """The number of tokens of a request's prompt."""
        return len(self.prompts[self.prompt_of[request]])

    def queue(self) -> deque[int]:
        """Request indices: long prompts first, copies of a prompt together."""
        order = range(len(self.prompt_of))
        return deque(sorted(order, key=lambda each: (-self.prompt_length(each), self.prompt_of[each])))

    def extend(self, requests: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of each of the `requests` `(R,)` from its `logits` `(R, V)`, which are overwritten.

        Returns the tokens and, bool, which requests end with them.

        Raises: FloatingPointError for logits that are not finite.
        """
        counts, logits = self.counts[requests], logits[:, : self.sampling.vocabulary]
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
        if self.logps is None:
            self.logps = torch.zeros(self.ids.shape, dtype=drawn.logps.dtype, device=self.device)
            self.kept = None if drawn.kept is None else torch.zeros_like(self.logps)
        self.ids[requests, counts], self.logps[requests, counts] = drawn.ids, drawn.logps
        if self.kept is not None and drawn.kept is not None:
            self.kept[requests, counts] = drawn.kept
        if self._seen is not None:
            self._seen[requests, drawn.ids] = True
        if self.listener is not None:
            self.listener(requests, drawn.ids)
        self.counts[requests] = counts = counts + 1
        self.stopped[requests] = stopped = self._stopped(requests, drawn.ids, counts)
        return drawn.ids, stopped | (counts >= self._limits[requests])

    def _penalise(self, requests: Tensor, counts: Tensor, logits: Tensor) -> None:
        """Apply the repetition penalty and the minimum length, in place."""
        if self.sampling.repetition_penalty != 1.0 and self.processors is None:
            if self._seen is None:
                self._seen = self.stopped.new_zeros(len(self.keys), logits.shape[1])
                for request, prompt in enumerate(self.prompt_of):
                    self._seen[request, self._tensor(self.begin or self.prompts[prompt])] = True
            penalise_(logits, self._seen[requests], self.sampling.repetition_penalty)
        if self.minima is not None:
            early = (counts < self.minima[requests]).nonzero()[:, 0]
            logits[early[:, None], self.ends[self.ends < logits.shape[1]]] = -torch.inf

    def _stopped(self, requests: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        """Bool `(R,)`: requests that end by a stop token or string with their newest tokens `ids`."""
        stopped = torch.isin(ids, self.ends)
        if self.strings is not None and self._may_end is not None:
            for row in (self._may_end[ids] & ~stopped).nonzero()[:, 0].tolist():
                stopped[row] = self.strings.ended(self.ids[requests[row], : int(counts[row])].tolist())
        return stopped

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


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The end tokens of tokenizer and model."""
    return sorted({*end_tokens(None, causal_core(model)), tokenizer.eos_token_id} - {None})


def end_tokens(given: Sequence[int] | None, model: Any) -> list[int]:
    """The `given` stop tokens, else the model's own (of `generation_config`, then `config`)."""
    if given is not None:
        return list(given)
    for config in (getattr(model, "generation_config", None), model.config):
        own = getattr(config, "eos_token_id", None)
        if own is not None:
            return list(own) if isinstance(own, (list, tuple)) else [int(own)]
    return []
