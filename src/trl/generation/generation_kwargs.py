"""The field names of transformers' `GenerationConfig` as fields of `Sampling`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig

# What says nothing about which tokens come out, or is decided by the engine.
_WITHOUT_EFFECT = frozenset(
    [
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "pad_token_id",
        "bos_token_id",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "compile_config",
        "disable_compile",
        "low_memory",
        "prefill_chunk_size",
        "transformers_version",
        "early_stopping",
        "length_penalty",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "is_assistant",
        "max_matching_ngram_size",
        "continuous_batching_config",
        "renormalize_logits",
        "decoder_start_token_id",
        "synced_gpus",
    ]
)
# What transformers' logits processors do.
_PROCESSED = frozenset(
    [
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "top_h",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "bad_words_ids",
        "sequence_bias",
        "suppress_tokens",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
    ]
)
# Values that ask for nothing; other values of names that are not processed are refused.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "token_healing": False,
    "remove_invalid_values": False,
    "use_mtp": False,
}


def _ends(value: Any) -> tuple[int, ...]:
    """End tokens as `generate` takes them, one or several; negative ones, an old way to say none, are out."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return tuple(int(token) for token in several if int(token) >= 0)


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _not_negative(value: Any) -> int:
    return max(int(value), 0)


_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "max_new_tokens": ("max_new_tokens", int),
    "min_new_tokens": ("min_new_tokens", _not_negative),
    "max_length": ("max_length", int),
    "min_length": ("min_length", _not_negative),
    "temperature": ("temperature", float),
    "top_k": ("top_k", _not_negative),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "do_sample": ("do_sample", bool),
    "eos_token_id": ("stop_token_ids", _ends),
    "stop_strings": ("stop_strings", _texts),
}


def sampling_fields(generation_kwargs: Mapping[str, Any] | GenerationConfig) -> dict[str, Any]:
    """The fields of `Sampling` that `generation_kwargs` set; None sets nothing.

    Raises: ValueError for what the engines cannot honour, and for names that `GenerationConfig` does not
    have.
    """
    if isinstance(generation_kwargs, GenerationConfig):
        generation_kwargs = vars(generation_kwargs)
    fields: dict[str, Any] = {}
    refused: list[str] = []
    processors: list[tuple[str, Any]] = []
    for name, value in generation_kwargs.items():
        if value is None or name in _WITHOUT_EFFECT or name.startswith("_"):
            continue
        if name in _FIELDS:
            field, convert = _FIELDS[name]
            fields[field] = convert(value)
        elif name in _NEUTRAL and value == _NEUTRAL[name]:
            continue
        elif name in _PROCESSED:
            processors.append((name, value))
        else:
            refused.append(f"{name}={value!r}")
    if refused:
        raise ValueError(
            f"generation_kwargs has {', '.join(sorted(refused))}, which rollouts cannot honour; allowed are "
            f"{', '.join(sorted({*_FIELDS, *_PROCESSED}))}. Take it out."
        )
    return {**fields, "processors": tuple(processors)} if processors else fields
