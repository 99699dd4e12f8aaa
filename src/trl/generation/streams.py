"""Random numbers by counter, one stream per request: functions of (seed, stream, position) alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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


def stream_keys(seed: int, streams: Sequence[int]) -> Tensor:
    """The key of each stream, int64 `(N,)`: streams of different seeds have nothing in common."""
    start = _mixed(torch.tensor([_signed(seed * _STEP + _STEP)]))
    names = torch.tensor([_signed(stream) for stream in streams], dtype=torch.int64)
    return _mixed(_mixed(start + names * _INCREMENT) ^ start)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Number `positions[i]` of stream `keys[i]`, uniform in [0, 1): float64 of their shape.

    >>> keys = stream_keys(7, [0, 1])
    >>> bool(torch.equal(uniforms(keys, torch.tensor([5, 5]))[:1], uniforms(keys[:1], torch.tensor([5]))))
    True
    """
    words = _mixed(keys + (positions + 1) * _INCREMENT)
    return _shifted(words, 11).double() * 2.0**-53
