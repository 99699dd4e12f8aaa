"""What every generation engine takes and gives: token ids in; ids, log-probs and finish reasons out."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from trl.generation.generation_kwargs import sampling_fields

logger = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 256
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn, for all requests of one call.

    `max_new_tokens`, `min_new_tokens` count completion tokens, `max_length`, `min_length` prompt and
    completion; both maxima hold (256 new tokens where neither is given), and stop tokens cannot be drawn
    before the minimum. `temperature` divides the logits; 0 is greedy, as is `do_sample=False`. `top_k` (None
    or 0: off), `top_p` (1: off) and `min_p` (None or 0: off) cut the distribution in this order, as in
    transformers; ties at the border stay. `repetition_penalty` (CTRL, arXiv:1909.05858, section 4.1) counts
    prompt and completion. `stop_token_ids=None` stops at the model's own end tokens, `()` at none. A
    completion keeps the token that stopped it, also the one that completed a stop string. `seed=None` takes a
    fresh one from torch's global generator, otherwise results depend on (seed, stream) alone. `processors` are
    names and values of further settings of `generate` (`typical_p`, `no_repeat_ngram_size`, ...), which
    transformers' logits processors apply; engines other than `TransformersEngine` refuse them.

    Raises: ValueError for a value outside of its range.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    do_sample: bool = True
    stop_token_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    max_length: int | None = None
    min_length: int = 0
    seed: int | None = None
    processors: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, got {self.max_new_tokens}. Give the longest completion "
                "in tokens."
            )
        self._check_fraction("top_p", self.top_p, "Use 1.0 to keep the whole distribution.")
        self._check_fraction("min_p", self.min_p, "Use None to keep the whole distribution.", zero=True)
        for name, value in self.processors:
            if name in ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"):
                self._check_fraction(name, value, "Leave it out to keep the whole distribution.")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature must be >= 0, got {self.temperature}. Use 0 for greedy, 1.0 for plain sampling."
            )
        if self.top_k is not None and (self.top_k < 0 or self.top_k != int(self.top_k)):
            raise ValueError(
                f"top_k must be a whole number >= 0, got {self.top_k}. Use 0 to keep all tokens."
            )
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ValueError(
                f"repetition_penalty must be > 0, got {self.repetition_penalty}. Use 1.0 for no penalty."
            )
        if any(not text for text in self.stop_strings):
            raise ValueError("stop_strings must not be empty texts, got ''. Leave it out.")

    def _check_fraction(self, name: str, value: float | None, advice: str, *, zero: bool = False) -> None:
        if value is not None and not (0 < value <= 1 or (zero and value == 0)):
            raise ValueError(f"{name} must be in {'[' if zero else '('}0, 1], got {value}. {advice}")

    @property
    def new_tokens(self) -> int | None:
        """The most completion tokens by `max_new_tokens` or by default; None where only `max_length` says."""
        return (
            DEFAULT_NEW_TOKENS
            if self.max_new_tokens is None and self.max_length is None
            else self.max_new_tokens
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return not self.do_sample or self.temperature == 0

    @property
    def truncates_distribution(self) -> bool:
        """Whether some tokens may be left out of the distribution, so that the kept mass is below 1."""
        return not self.greedy and bool(
            self.top_k or self.min_p or (self.top_p is not None and self.top_p < 1)
        )

    @property
    def alters_distribution(self) -> bool:
        """Whether tokens are drawn from another distribution than the policy's at this temperature: one that is cut, greedy or
        penalised, or that has no stop tokens up to a least length."""
        bans = self.stop_token_ids != () and max(self.min_new_tokens, self.min_length) > 0
        return (
            self.truncates_distribution
            or self.greedy
            or self.repetition_penalty != 1
            or bans
            or bool(self.processors)
        )

    def refuse_processors(self, engine: str) -> None:
        """Raise ValueError for settings that only transformers' logits processors apply."""
        if self.processors:
            raise ValueError(
                f"{engine} does not support {', '.join(f'{name}={value!r}' for name, value in self.processors)}. "
                "Take it out of generation_kwargs, or generate with transformers (use_vllm=False)."
            )

    def updated(self, generation_kwargs: Mapping[str, Any] | Any | None) -> Sampling:
        """These settings overridden by `generation_kwargs`: a dict with the field names of transformers'
        `GenerationConfig`, or such a config.

        Raises: ValueError for what an engine cannot honour (beams, constraints ...) and for unknown names.
        """
        return self if not generation_kwargs else replace(self, **sampling_fields(generation_kwargs))


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion.

    `logps` `(T,)`, in nats, belong to the distribution that was sampled from: after repetition penalty,
    temperature and cuts (where nothing is drawn, for greedy, to the distribution without cuts). `kept` `(T,)`
    is the log of the mass that top-k, top-p and min-p kept, None where nothing was cut: `logps + kept` are
    the log-probs without the cuts. Both are at least float32 and on the CPU.
    """

    ids: list[int]
    logps: Tensor
    kept: Tensor | None
    finish_reason: FinishReason


@runtime_checkable
class Engine(Protocol):
    """Turns prompt ids into completion ids.

    `exact`: whether log-probs of 32 bits are those of the scoring forward up to rounding, as it computes them too.
    `together`: whether this process generates only at the same time as others, which hold parts of the weights.
    """

    exact: bool

    @property
    def together(self) -> bool: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        streams: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Generated]:
        """One completion per prompt, in order; equal prompts are copies of one and are prefilled once.

        `streams[i]` names the random stream of request i (default: i): what it becomes depends on its prompt,
        the seed and its stream, never on the other requests. `limits[i]` is a greatest number of new tokens of
        its own, beside those of `sampling`.
        """
        ...

    def sync_weights(self, model: Any, step: int) -> None:
        """Take over the weights of `model` as they are after optimiser step `step`."""
        ...

    def close(self) -> None:
        """Give up what the engine holds; it cannot generate afterwards."""
        ...


def check_requests(
    prompts: Sequence[Sequence[int]],
    streams: Sequence[int] | None,
    *,
    context_length: int | None,
    vocabulary: int | None,
    room: int = 1,
) -> tuple[list[tuple[int, ...]], list[int]]:
    """The prompts as tuples of ids, and a stream for each.

    Raises: ValueError for an empty prompt, an id that is no token, a prompt that does not leave `room`
    (tokens; 0 where an encoder reads it) in the model's `context_length`, and a wrong number of streams.
    """
    found = [_token_ids(prompt) for prompt in prompts]
    for index, prompt in enumerate(found):
        if not prompt:
            raise ValueError(
                f"prompts[{index}] is empty, expected at least one token. Begin it with the tokenizer's bos "
                "token."
            )
        if context_length is not None and len(prompt) + room > context_length:
            wanted = " and must leave room for a completion" if room else ""
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens, the model's context length is {context_length}{wanted}. "
                "Truncate the prompt."
            )
        if min(prompt) < 0 or (vocabulary is not None and max(prompt) >= vocabulary):
            raise ValueError(
                f"prompts[{index}] has token ids from {min(prompt)} to {max(prompt)}, the model has 0 to "
                f"{(vocabulary or 0) - 1}. Use the model's own tokenizer, and no -100."
            )
    names = list(range(len(found))) if streams is None else [int(stream) for stream in streams]
    if len(names) != len(found):
        raise ValueError(
            f"streams must be one per prompt ({len(found)}), got {len(names)}. Leave it out to count them."
        )
    return found, names


def _token_ids(prompt: Sequence[int] | Tensor) -> tuple[int, ...]:
    return tuple(prompt.tolist() if isinstance(prompt, Tensor) else map(int, prompt))


def completion_limits(
    starts: Sequence[int], sampling: Sampling, context_length: int | None, own: Sequence[int] | None = None
) -> list[int]:
    """The most tokens each completion may have: by `max_new_tokens`, `max_length`, the model's context length and its
    `own` limit.

    `starts` are the tokens that a completion goes on from: its prompt's, or those that an encoder-decoder
    begins with.

    Raises: ValueError for a prompt that fills `max_length`, and for own limits that are none.
    """
    if own is not None and (len(own) != len(starts) or min(own, default=1) < 1):
        raise ValueError(
            f"limits must be one number >= 1 per prompt ({len(starts)}), got {list(own)}. Leave out prompts "
            "that nothing may follow."
        )
    limits, new_tokens = [], sampling.new_tokens
    for index, start in enumerate(starts):
        rooms = [bound - start for bound in (context_length, sampling.max_length) if bound is not None]
        limit = min(rooms if new_tokens is None else [new_tokens, *rooms])
        if limit < 1:
            raise ValueError(
                f"prompts[{index}] has {start} tokens, max_length is {sampling.max_length} and must leave "
                "room for a completion. Use max_new_tokens, or truncate the prompt."
            )
        limits.append(limit if own is None else min(limit, own[index]))
    return limits
