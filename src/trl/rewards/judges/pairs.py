"""Pairs of completions in the order in which a judge is shown them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple


class ShownPair(NamedTuple):
    """A prompt with two completions; `turned` where the second one is shown first."""

    prompt: str
    first: str
    second: str
    turned: bool

    def given(self, shown: int) -> int:
        """The index, among the completions as they were given, of one of the two that are shown."""
        return 1 - shown if self.turned else shown


def shown_pairs(
    prompts: Sequence[str], completions: Sequence[Sequence[str]], *, shuffle: bool
) -> list[ShownPair]:
    """Every pair as it is shown: with `shuffle`, each of its two completions first with probability 1/2.

    Which one follows from the texts alone: the same question is asked in the same way in every run, whatever was asked
    before, and a run that is resumed draws no other order.

    >>> [pair] = shown_pairs(["2 + 2?"], [["4", "5"]], shuffle=False)
    >>> pair.first, pair.given(0)
    ('4', 0)

    Raises: ValueError for another number of prompts than pairs, and for a prompt without exactly two completions.
    """
    if len(prompts) != len(completions):
        raise ValueError(
            f"prompts has {len(prompts)} entries and completions {len(completions)}, expected one pair for each prompt. Give both "
            "the same length."
        )
    for row, pair in enumerate(completions):
        if isinstance(pair, str) or len(pair) != 2:
            given = "a text" if isinstance(pair, str) else f"{len(pair)} completions"
            raise ValueError(
                f"prompt {row} comes with {given}, expected a list of two. A pairwise judge compares two completions of a prompt."
            )
    return [_shown(prompt, pair, shuffle) for prompt, pair in zip(prompts, completions, strict=True)]


def _shown(prompt: str, pair: Sequence[str], shuffle: bool) -> ShownPair:
    first, second = pair
    turned = shuffle and _shows_larger_first(prompt, *sorted(pair)) == (first < second)
    return ShownPair(prompt, second, first, True) if turned else ShownPair(prompt, first, second, False)


def _shows_larger_first(*texts: str) -> bool:
    """A fair coin that belongs to the texts."""
    lengths = ",".join(str(len(text)) for text in texts)  # so that no two triples read the same
    return bool(sha256("".join((lengths, *texts)).encode("utf-8", "surrogatepass")).digest()[0] & 1)
