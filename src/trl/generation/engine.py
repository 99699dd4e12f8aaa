"""The interface of generation engines: token ids in; token ids, their log-probs and finish reasons out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import GenerationConfig

DEFAULT_NEW_TOKENS = 256
FinishReason = Literal["stop", "length"]
Prompts = Sequence[Sequence[int]]
Numbers = Sequence[int] | None  # one per prompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of all requests of one call.

    `max_new_tokens` and `min_new_tokens` count completion tokens, `max_length` and `min_length` prompt and completion;
    both maxima hold (256 new tokens if neither is given), and stop tokens are excluded before the minimum.
    `temperature` divides the logits; 0 is greedy, as is `do_sample=False`. `top_k` (None or 0: off), `top_p` (1: off)
    and `min_p` (None or 0: off) truncate the distribution in this order, as in transformers; ties at the border are
    kept. `repetition_penalty` (CTRL, arXiv:1909.05858, section 4.1) counts prompt and completion. `stop_token_ids=None`
    are the model's own end tokens. A completion keeps the token that stopped it, also the one that completed a stop
    string. `seed=None` draws a seed; otherwise results depend on (seed, stream) only. `processors` are further settings
    of `generate`, which only `TransformersEngine` supports. Token ids at or beyond `vocabulary` are never drawn; with
    vLLM they are an error. Raises: ValueError for a value out of range.
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
    vocabulary: int | None = None
    processors: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty")
        values = {name: getattr(self, name) for name in names} | {"min_p": self.min_p or None}
        for name, value in (values | dict(self.processors)).items():
            allowed, words = _ALLOWED.get(name, (None, ""))
            if allowed is not None and value is not None and not allowed(value):
                raise ValueError(f"{name} must be {words}, got {value}.")
        if "" in self.stop_strings:
            raise ValueError("stop_strings must not be empty texts, got ''. Leave it out.")

    @property
    def new_tokens(self) -> int | None:
        """`max_new_tokens` or its default; None if only `max_length` is given."""
        is_default = self.max_new_tokens is None and self.max_length is None
        return DEFAULT_NEW_TOKENS if is_default else self.max_new_tokens

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return not self.do_sample or self.temperature == 0

    @property
    def truncates_distribution(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens from the distribution."""
        is_nucleus = self.top_p is not None and self.top_p < 1
        return not self.greedy and bool(self.top_k or self.min_p or is_nucleus)

    @property
    def alters_distribution(self) -> bool:
        """Whether tokens are drawn from another distribution than the policy's at this temperature."""
        bans_ends = self.stop_token_ids != () and max(self.min_new_tokens, self.min_length) > 0
        is_penalised = self.repetition_penalty != 1 or bool(self.processors)
        is_cut = self.vocabulary is not None
        return self.truncates_distribution or self.greedy or is_penalised or bans_ends or is_cut

    def refuse_processors(self, engine: str) -> None:
        """Raise ValueError if there are settings that only transformers' logits processors apply."""
        if self.processors:
            settings = ", ".join(f"{name}={value!r}" for name, value in self.processors)
            raise ValueError(f"{engine} does not support {settings} of generation_kwargs. Use use_vllm=False.")

    def updated(self, generation_kwargs: Any) -> "Sampling":
        """These settings overridden by transformers' `GenerationConfig`, or a dict with its field names (None: unset).

        Raises: ValueError for unsupported settings (beams, constraints, ...) and unknown names.
        """
        if not generation_kwargs:
            return self
        is_config = isinstance(generation_kwargs, GenerationConfig)
        settings = (vars(generation_kwargs) if is_config else generation_kwargs).items()
        rest = {name: value for name, value in settings if value is not None and not name.startswith("_")}
        fields = {_FIELDS[name][0]: _FIELDS[name][1](rest.pop(name)) for name in _FIELDS if name in rest}
        if refused := [f"{name}={rest[name]!r}" for name in unsupported_settings(rest)]:
            known = ", ".join(sorted({*_FIELDS, *_PROCESSED}))
            settings = f"generation_kwargs has {', '.join(sorted(refused))}"
            raise ValueError(f"{settings}, which rollouts do not support. Supported are {known}.")
        processors = tuple(item for item in rest.items() if item[0] in _PROCESSED and item not in _NEUTRAL.items())
        return replace(self, **fields, processors=processors or self.processors)


# Settings of `generate` that do not change which tokens come out, or that the engine decides.
_WITHOUT_EFFECT = frozenset([
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "pad_token_id", "bos_token_id",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "compile_config", "disable_compile", "low_memory", "prefill_chunk_size", "transformers_version", "early_stopping",
    "length_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "is_assistant", "max_matching_ngram_size", "renormalize_logits",
    "continuous_batching_config", "decoder_start_token_id", "synced_gpus",
])  # fmt: skip
# Applied by transformers' logits processors.
_FRACTIONS = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
_ALLOWED: dict[str, tuple[Callable[[float], bool], str]] = {
    **{name: (lambda x: 0 < x <= 1, "in (0, 1]") for name in ("top_p", "min_p", *_FRACTIONS)},
    "max_new_tokens": (lambda x: x >= 1, "at least 1"),
    "temperature": (lambda x: 0 <= x < math.inf, ">= 0"),
    "top_k": (lambda x: x >= 0 and x == int(x), "a whole number >= 0 (0: all tokens)"),
    "repetition_penalty": (lambda x: 0 < x < math.inf, "> 0"),
}
_PROCESSED = frozenset([
    *_FRACTIONS, "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids",
    "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty",
])  # fmt: skip
# Values that switch a setting off; other values are refused, unless the setting is in `_PROCESSED`.
_NEUTRAL: dict[str, float] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), 0.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("token_healing", "remove_invalid_values", "use_mtp"), False),
}


def _ends(value: int | list[int]) -> tuple[int, ...]:
    """One or several end tokens, without negative ones (none)."""
    tokens = value if isinstance(value, (list, tuple)) else [value]
    return tuple(int(token) for token in tokens if int(token) >= 0)


# The field of each setting, and the function that converts its values.
_FIELDS: dict[str, tuple[str, Callable[..., object]]] = {
    **{name: (name, int) for name in ("max_new_tokens", "max_length")},
    **{name: (name, lambda value: max(int(value), 0)) for name in ("min_new_tokens", "min_length", "top_k")},
    **{name: (name, float) for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
    "do_sample": ("do_sample", bool),
    "eos_token_id": ("stop_token_ids", _ends),
    "stop_strings": ("stop_strings", lambda value: (value,) if isinstance(value, str) else tuple(value)),
}


def unsupported_settings(settings: Mapping[str, object]) -> list[str]:
    """The names of those settings of `generate` that rollouts do not support."""
    known = _WITHOUT_EFFECT | _PROCESSED | _FIELDS.keys()
    return [item[0] for item in settings.items() if item[0] not in known and item not in _NEUTRAL.items()]


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion.

    `logps` `(T,)`, in nats, are those of the distribution that was sampled from: after repetition penalty, temperature
    and truncation (greedy: without truncation). `kept` `(T,)` is the log of the mass that top-k, top-p and min-p kept,
    None without truncation: `logps + kept` are the log-probs without it. Both are at least float32 and on the CPU.
    """

    ids: list[int]
    logps: Tensor
    kept: Tensor | None
    finish_reason: FinishReason


@runtime_checkable
class Engine(Protocol):
    """Turns prompt ids into completion ids.

    `exact`: whether float32 log-probs equal those of the scoring forward up to rounding.
    `together`: whether several processes must call `generate` at the same time, because they share weights.
    """

    @property
    def exact(self) -> bool: ...

    @property
    def together(self) -> bool: ...

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, streams: Numbers = None, limits: Numbers = None
    ) -> list[Generated]:
        """One completion for each prompt, in order; equal prompts are run once.

        `streams[i]` is the random stream of request i (default: i): its completion depends on its prompt, the seed and
        the stream, not on the other requests. `limits[i]` is its own maximum of new tokens, beside those of `sampling`.
        """
        ...

    def sync_weights(self, model: nn.Module, step: int) -> None:
        """Use the weights of `model` after optimiser step `step`."""
        ...

    def close(self) -> None: ...


def check_requests(
    prompts: Prompts, streams: Numbers, *, context_length: int | None, vocabulary: int | None, room: int = 1
) -> tuple[list[tuple[int, ...]], list[int]]:
    """The prompts as tuples of ids, and their random streams; `room` is for completions. Raises: ValueError."""
    rows = [tuple(p.tolist() if isinstance(p, Tensor) else map(int, p)) for p in prompts]
    for index, prompt in enumerate(rows):
        if not prompt:
            raise ValueError(f"prompts[{index}] is empty, expected a token, such as the bos token.")
        if context_length is not None and len(prompt) + room > context_length:
            wanted = " and must leave room for a completion" if room else ""
            tokens = f"{len(prompt)} tokens, the context length is {context_length}{wanted}"
            raise ValueError(f"prompts[{index}] has {tokens}. Cut it.")
        if min(prompt) < 0 or (vocabulary is not None and max(prompt) >= vocabulary):
            span = f"ids from {min(prompt)} to {max(prompt)}"
            raise ValueError(f"prompts[{index}] has {span}, the model 0 to {(vocabulary or 0) - 1}.")
    names = list(range(len(rows))) if streams is None else [int(stream) for stream in streams]
    if len(names) != len(rows):
        raise ValueError(f"streams must be one per prompt ({len(rows)}), got {len(names)}.")
    return rows, names


def completion_limits(
    starts: Sequence[int], sampling: Sampling, context_length: int | None, own_limits: Numbers = None
) -> list[int]:
    """The maximum of new tokens of each completion, by `sampling`, the context length and its own limit.

    `starts` are the numbers of tokens before each completion (for an encoder-decoder: in the decoder). Raises:
    ValueError without room in `max_length`, and for invalid own limits.
    """
    if own_limits is not None and (len(own_limits) != len(starts) or min(own_limits, default=1) < 1):
        raise ValueError(f"limits must be one number >= 1 per prompt ({len(starts)}), got {list(own_limits)}.")
    limits, new_tokens = [], sampling.new_tokens
    for index, start in enumerate(starts):
        rooms = [bound - start for bound in (context_length, sampling.max_length) if bound is not None]
        limit = min(rooms if new_tokens is None else [new_tokens, *rooms])
        if limit < 1:
            part = f"part of max_length={sampling.max_length}"
            raise ValueError(f"prompts[{index}] has {start} tokens, {part}. Use max_new_tokens.")
        limits.append(limit if own_limits is None else min(limit, own_limits[index]))
    return limits
