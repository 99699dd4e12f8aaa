"""Base classes of judges, which verify, compare or rank completions."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple


class BaseJudge(ABC):
    """Base class of judges of completions."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[str], shuffle_order: bool = True) -> list:
        """One answer for each prompt. With `shuffle_order` completions are shown in random order."""


class BaseRankJudge(ABC):
    """Ranks the completions of a prompt.

    Example:
        >>> class ShortestFirst(BaseRankJudge):
        ...     def judge(self, prompts, completions, shuffle_order=True):
        ...         return [sorted(range(len(texts)), key=lambda i: len(texts[i])) for texts in completions]
        >>> ShortestFirst().judge(["The capital of France?"], [["It is Paris.", "Paris", "Paris."]])
        [[1, 2, 0]]
    """

    @abstractmethod
    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[list[int]]:
        """The indices of each prompt's completions, best first."""


class BasePairwiseJudge(BaseJudge):
    """Compares two completions of a prompt.

    Example:
        >>> class Shorter(BasePairwiseJudge):
        ...     def judge(self, prompts, completions, shuffle_order=False):
        ...         return [int(len(second) < len(first)) for first, second in completions]
        >>> Shorter().judge(["The capital of France?"], [["It is Paris.", "Paris"]])
        [1]
    """

    @abstractmethod
    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[int]:
        """The index (0 or 1) of the better completion of each pair; -1 for no answer.

        `shuffle_order` shows some pairs in reverse order, against position bias.
        """


class BaseBinaryJudge(BaseJudge):
    """Says whether a completion is good: it follows a rule, or agrees with a reference answer.

    Example:
        >>> class IsPolite(BaseBinaryJudge):
        ...     def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        ...         return [int("please" in text) for text in completions]
        >>> IsPolite().judge(["Ask for salt."], ["Salt, please."])
        [1]
    """

    @abstractmethod
    def judge(
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """1 for each good completion, 0 for each bad one, -1 for no answer.

        `gold_completions` are reference answers, one for each prompt.
        """


class RandomPairwiseJudge(BasePairwiseJudge):
    """Chooses at random with Python's global generator, for trials."""

    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[int]:
        """0 or 1 for each pair."""
        return [random.randrange(len(pair)) for pair in completions]


class RandomRankJudge(BaseRankJudge):
    """Ranks at random with Python's global generator, for trials."""

    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[list[int]]:
        """A random order of each prompt's completions."""
        return [random.sample(range(len(texts)), len(texts)) for texts in completions]


class AllTrueJudge(BaseBinaryJudge):
    """Combines binary judges: 1 if all return 1, 0 if any returns 0, else -1.

    Source: the mixture of judges of Xu et al. 2024 (arXiv:2409.20370).
    """

    def __init__(self, judges: list[BaseBinaryJudge]) -> None:
        if not judges:
            raise ValueError("judges is empty. Pass at least one binary judge.")
        self.judges = judges

    def judge(
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """1, 0 or -1 for each completion.

        Raises: ValueError for another answer of a judge, and for another number of answers.
        """
        columns = [each.judge(prompts, completions, gold_completions, shuffle_order) for each in self.judges]
        for each, column in zip(self.judges, columns, strict=True):
            wrong = [verdict for verdict in column if verdict not in (0, 1, -1)]
            if wrong or len(column) != len(completions):
                raise ValueError(
                    f"{type(each).__name__} gave {len(column)} answers for {len(completions)} completions"
                    f"{f' and {wrong[0]!r} among them' if wrong else ''}, expected 1, 0 or -1 for each."
                )
        return [min(row, key=lambda verdict: (0, -1, 1).index(verdict)) for row in zip(*columns, strict=True)]


class ShownPair(NamedTuple):
    """A prompt with two completions in the order in which they are shown; `turned` if that is reversed."""

    prompt: str
    first: str
    second: str
    turned: bool

    def given(self, shown: int) -> int:
        """The original index of the completion that is shown at this place."""
        return 1 - shown if self.turned else shown


def shown_pairs(
    prompts: Sequence[str], completions: Sequence[Sequence[str]], *, shuffle: bool
) -> list[ShownPair]:
    """Every pair as it is shown: with `shuffle`, reversed with probability 1/2.

    The order depends on the texts only, so a resumed run makes the same requests.

    >>> [pair] = shown_pairs(["2 + 2?"], [["4", "5"]], shuffle=False)
    >>> pair.first, pair.given(0)
    ('4', 0)

    Raises: ValueError for another number of prompts than pairs, and for a prompt without exactly two completions.
    """
    if len(prompts) != len(completions):
        raise ValueError(
            f"{len(prompts)} prompts were given with {len(completions)} pairs, expected as many."
        )
    found = []
    for prompt, pair in zip(prompts, completions, strict=True):
        if isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"prompt {prompt!r} has {pair!r}, expected a list of two completions.")
        first, second = pair
        texts = (prompt, *sorted((first, second)))
        lengths = ",".join(str(len(text)) for text in texts)  # distinguishes texts with equal concatenations
        larger_first = sha256("".join((lengths, *texts)).encode("utf-8", "surrogatepass")).digest()[0] & 1
        turned = shuffle and bool(larger_first) == (first < second)
        shown = (second, first) if turned else (first, second)
        found.append(ShownPair(prompt, *shown, turned))
    return found
