"""Requests as tensors: their limits, stop strings, random streams and results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.generation.engine import FinishReason, Generated, Sampling, completion_limits
from trl.generation.transformers.choosing import Processors, choose, penalise_
from trl.generation.transformers.steps import fitted
from trl.models.parts import causal_core

_WORD = (1 << 64) - 1
_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15], dtype=np.uint64)
_FIRST, _SECOND, _INCREMENT = _FACTORS.view(np.int64).tolist()  # torch's words have a sign
_MARGIN = 4  # more tokens than the longest stop string needs: decoded first, a token may lose its space


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
    numbers = np.array([number & _WORD for number in (seed, *streams)], dtype=np.uint64)
    start, names = torch.from_numpy(numbers.view(np.int64)).split([1, len(streams)])
    start = _mixed((start + 1) * _INCREMENT)
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

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        if tokenizer is None:
            raise ValueError(f"stop_strings {list(texts)} need a tokenizer. Or use stop_token_ids.")
        self.texts, self.tokenizer = tuple(texts), tokenizer
        self.span = max(len(text.encode()) for text in texts) + _MARGIN
        self._lasts = {text[-1] for text in texts} | {"\ufffd"}  # the latter for a part of a character
        self._loses_spaces = any(text[-1].isspace() for text in texts)  # tokens decoded alone may
        self._may_end: dict[int, bool] = {}  # by token that came

    def may_end(self, token: int) -> bool:
        """Whether a token may complete a stop string."""
        if token not in self._may_end:
            text = self.tokenizer.decode([token], skip_special_tokens=False)
            self._may_end[token] = self._loses_spaces or not self._lasts.isdisjoint(text)
        return self._may_end[token]

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether the newest of a completion's `ids` completed a stop string."""
        tail = list(ids[-self.span :])
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text, before = (self.tokenizer.decode(part, **options) for part in (tail, tail[:-1]))
        return any(
            stop in text and (stop not in before or text.rfind(stop) + len(stop) > len(before)) for stop in self.texts
        )


@dataclass(eq=False)
class Rules:
    """How the tokens of some requests are drawn, and which tokens and strings end them.

    `processors` replace the distribution settings of `sampling`. `keeps`: whether draws have a kept mass.
    """

    sampling: Sampling
    ends: Tensor
    strings: StopStrings | None
    processors: Processors | None
    keeps: bool = False


class Requests:
    """Requests and their completions so far, in tables with a row for each; more may be added while others run.

    `prompts` are distinct prompts by number, `prompt_of` the number of each request's prompt, `limits` each request's
    maximum of new tokens. `begin` are the tokens that an encoder-decoder's completions begin with, None for a decoder.
    `listener(requests, ids)`, both `(R,)`, is called with the newest tokens.
    """

    def __init__(
        self, *, context_length: int | None, device: torch.device, begin: Sequence[int] | None = None,
        listener: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        self.context_length, self.device, self.begin, self.listener = context_length, device, begin, listener
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.prompt_of: dict[int, int] = {}
        self.limits: dict[int, int] = {}
        self._rules: list[Rules] = []
        self._free: list[int] = []
        self._prompts_so_far = 0
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self.counts = self.keys = self._limits = self._minima = self._rule_of = none
        self.stopped = none.bool()
        self.ids = none.view(0, 0)
        self.logps: Tensor | None = None
        self.kept: Tensor | None = None
        self._seen: Tensor | None = None  # bool `(N, V)`: tokens of each request's prompt and completion
        self._has_minima = False

    def add(
        self, prompts: Sequence[tuple[int, ...]], streams: Sequence[int], sampling: Sampling, rules: Rules, *,
        seed: int, limits: Sequence[int] | None = None,
    ) -> list[int]:  # fmt: skip
        """Add requests, and return their numbers; `streams` are of the `seed`, `limits` further maxima of new tokens.

        Equal prompts of one call have one number. Raises: ValueError for a prompt that leaves no room for a completion.
        """
        starts = [len(prompt if self.begin is None else self.begin) for prompt in prompts]
        limits = completion_limits(starts, sampling, self.context_length, limits)
        minima = [max(sampling.min_new_tokens, sampling.min_length - start) for start in starts]
        numbers = {prompt: self._prompts_so_far + n for n, prompt in enumerate(dict.fromkeys(prompts))}
        self._prompts_so_far += len(numbers)
        self.prompts |= {number: prompt for prompt, number in numbers.items()}
        added = self._rows(len(prompts), max(limits))
        self.prompt_of |= {row: numbers[prompt] for row, prompt in zip(added, prompts, strict=True)}
        self.limits |= dict(zip(added, limits, strict=True))
        if rules not in self._rules:
            self._rules.append(rules)
        rows = self.counts.new_tensor(added)
        self.counts[rows], self.stopped[rows] = 0, False
        self.keys[rows] = rng_stream_keys(seed, streams).to(self.device)
        self._limits[rows], self._minima[rows] = self.counts.new_tensor(limits), self.counts.new_tensor(minima)
        self._rule_of[rows] = self._rules.index(rules)
        self._has_minima = self._has_minima or (max(minima) > 0 and len(rules.ends) > 0)
        return added

    def _rows(self, count: int, longest: int) -> list[int]:
        """Free rows of the tables, which grow where there are too few."""
        if (more := count - len(self._free)) > 0:
            have = len(self.counts)
            size = have + more if have == 0 else max(have + more, 2 * have)
            self._free += range(have, size)
            for name in ("counts", "keys", "_limits", "_minima", "_rule_of", "stopped"):
                setattr(self, name, fitted(getattr(self, name), [size], getattr(self, name)))
        for name in ("ids", "logps", "kept", "_seen"):
            if (table := getattr(self, name)) is not None:
                setattr(self, name, fitted(table, [len(self.counts), longest], table))
        rows, self._free = self._free[:count], self._free[count:]
        return rows

    def release(self, request: int) -> None:
        """Forget a request."""
        number = self.prompt_of.pop(request)
        del self.limits[request]
        self._free.append(request)
        if number not in self.prompt_of.values():
            del self.prompts[number]

    def forget_rules(self) -> None:
        """Forget the rules of requests that have ended, when none is left."""
        assert not self.prompt_of
        self._rules.clear()
        self._has_minima = False

    def queue(self, requests: Iterable[int] | None = None) -> deque[int]:
        """Requests (by default all): long prompts first, copies of a prompt together."""
        numbers = {request: self.prompt_of[request] for request in (self.prompt_of if requests is None else requests)}
        return deque(sorted(numbers, key=lambda request: (-len(self.prompts[numbers[request]]), numbers[request])))

    def extend(self, requests: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of each of the `requests` `(R,)` from its `logits` `(R, V)`, which are overwritten.

        Returns the tokens and, bool, which requests end with them. Raises: FloatingPointError for NaN or infinity.
        """
        if len(self._rules) == 1:
            return self._extend(self._rules[0], requests, logits)
        rule_of = self._rule_of[requests]
        ids, done = torch.zeros_like(requests), torch.zeros_like(requests, dtype=torch.bool)
        for number in rule_of.unique().tolist():
            rows = (rule_of == number).nonzero()[:, 0]
            ids[rows], done[rows] = self._extend(self._rules[number], requests[rows], logits[rows])
        return ids, done

    def _extend(self, rules: Rules, requests: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        counts, logits = self.counts[requests], logits[:, : rules.sampling.vocabulary]
        if rules.sampling.repetition_penalty != 1.0 and rules.processors is None:
            self._penalise(rules.sampling.repetition_penalty, requests, counts, logits)
        if self._has_minima:
            early = (counts < self._minima[requests]).nonzero()[:, 0]
            logits[early[:, None], rules.ends[rules.ends < logits.shape[1]]] = -torch.inf
        numbers = uniforms(self.keys[requests], counts)
        if rules.processors is None:
            drawn = choose(logits, numbers, rules.sampling)
        else:
            starts = [self.prompts[self.prompt_of[request]] for request in requests.tolist()]
            drawn = rules.processors.choose(logits, numbers, starts, self.begin, self.ids[requests], counts)
        if not bool((finite := torch.isfinite(drawn.logps)).all()):
            row = int((~finite).nonzero()[0, 0])
            number = int(requests[row])
            raise FloatingPointError(f"logits of prompts[{number}] must be finite. Check weights and dtype.")
        if self.logps is None:
            self.logps = torch.zeros(self.ids.shape, dtype=drawn.logps.dtype, device=self.device)
        self.ids[requests, counts], self.logps[requests, counts] = drawn.ids, drawn.logps
        if drawn.kept is not None:
            self.kept, rules.keeps = fitted(self.kept, self.logps.shape, self.logps), True
            self.kept[requests, counts] = drawn.kept
        if self._seen is not None:
            self._seen[requests, drawn.ids] = True
        if self.listener is not None:
            self.listener(requests, drawn.ids)
        self.counts[requests] = counts = counts + 1
        stopped = torch.isin(drawn.ids, rules.ends)
        if (strings := rules.strings) is not None:
            for row in [row for row, token in enumerate(drawn.ids.tolist()) if strings.may_end(token)]:
                stopped[row] |= strings.ended(self.ids[requests[row], : int(counts[row])].tolist())
        self.stopped[requests] = stopped
        return drawn.ids, stopped | (counts >= self._limits[requests])

    def _penalise(self, penalty: float, requests: Tensor, counts: Tensor, logits: Tensor) -> None:
        """Apply the repetition penalty, in place."""
        self._seen = fitted(self._seen, [len(self.counts), logits.shape[1]], self.stopped)
        for request in requests[counts == 0].tolist():
            begin = self.begin or self.prompts[self.prompt_of[request]]
            self._seen[request] = False
            self._seen[request, self.counts.new_tensor(begin)] = True
        penalise_(logits, self._seen[requests, : logits.shape[1]], penalty)

    def results(self, requests: Sequence[int] | None = None) -> list[Generated]:
        """The completions of requests (by default all), in their order."""
        assert self.logps is not None
        rows = self.counts.new_tensor(list(self.prompt_of) if requests is None else requests)
        ids, logps = self.ids[rows].tolist(), self.logps[rows].cpu()
        kept = None if self.kept is None else self.kept[rows].cpu()
        parts = (self.counts[rows], self.stopped[rows], self._rule_of[rows])
        completions = []
        for row, (count, stopped, rule) in enumerate(zip(*(part.tolist() for part in parts), strict=True)):
            mass = kept[row, :count].clone() if kept is not None and self._rules[rule].keeps else None
            reason: FinishReason = "stop" if stopped else "length"
            completions.append(Generated(ids[row][:count], logps[row, :count].clone(), mass, reason))
        return completions


def fresh_seed() -> int:
    """A seed from torch's global generator."""
    return int(torch.randint(2**62, ()))


def stop_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end tokens of tokenizer and model."""
    eos: Any = tokenizer.eos_token_id
    return sorted({*end_tokens(None, causal_core(model)), eos} - {None})


def end_tokens(stop_token_ids: Sequence[int] | None, model: PreTrainedModel) -> list[int]:
    """The `stop_token_ids`, else the model's own (of `generation_config`, then `config`)."""
    if stop_token_ids is not None:
        return list(stop_token_ids)
    for config in (getattr(model, "generation_config", None), model.config):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]
    return []
