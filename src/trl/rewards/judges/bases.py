"""What judges answer: whether completions are good, which of two is better, or how several rank."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

_VERDICTS = (0, 1, -1)


class BaseJudge(ABC):
    """Judges completions of prompts; the base of judges that are of no kind below."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[str], shuffle_order: bool = True) -> list:
        """One answer for each prompt. `shuffle_order` is for judges that show completions in some order."""


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
        """The indices of each prompt's completions, the best one's first."""


class BasePairwiseJudge(BaseJudge):
    """Says which of two completions of a prompt is better.

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
        """The index, 0 or 1, of the better completion of each pair; -1 where the judge has no answer.

        `shuffle_order` shows some pairs the other way round, against judges that favour a position.
        """


class BaseBinaryJudge(BaseJudge):
    """Says whether a completion is good: it keeps to a rule, or is as right as a known answer.

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
        """1 for each good completion, 0 for each other, -1 where the judge has no answer.

        `gold_completions` are right answers, one for each prompt; `shuffle_order` is for judges that show both.
        """


class RandomPairwiseJudge(BasePairwiseJudge):
    """Chooses at random, from Python's global generator: for trying a program out."""

    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[int]:
        """0 or 1 for each pair."""
        return [random.randrange(len(pair)) for pair in completions]


class RandomRankJudge(BaseRankJudge):
    """Ranks at random, from Python's global generator: for trying a program out."""

    def judge(
        self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
    ) -> list[list[int]]:
        """A random order of each prompt's completions."""
        return [random.sample(range(len(texts)), len(texts)) for texts in completions]


class AllTrueJudge(BaseBinaryJudge):
    """1 where every one of several binary judges says 1, 0 where any says 0, else -1 (one of them has no answer).

    Source: the mixture of judges of Xu et al. 2024 (arXiv:2409.20370).
    """

    def __init__(self, judges: list[BaseBinaryJudge]) -> None:
        if not judges:
            raise ValueError(
                "judges is empty, expected at least one binary judge. Pass those that must agree."
            )
        self.judges = judges

    def judge(
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """1, 0 or -1 for each completion.

        Raises: ValueError for another answer of a judge, and for another number of them.
        """
        columns = [each.judge(prompts, completions, gold_completions, shuffle_order) for each in self.judges]
        for each, column in zip(self.judges, columns, strict=True):
            _check_verdicts(column, len(completions), type(each).__name__)
        return [min(row, key=lambda verdict: (0, -1, 1).index(verdict)) for row in zip(*columns, strict=True)]


def _check_verdicts(verdicts: Sequence[int], count: int, name: str) -> None:
    wrong = [verdict for verdict in verdicts if verdict not in _VERDICTS]
    if wrong or len(verdicts) != count:
        raise ValueError(
            f"{name} gave {len(verdicts)} answers for {count} completions{f', {wrong[0]!r} among them' if wrong else ''}; expected "
            "1, 0 or -1 for each. Correct its judge method."
        )


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
