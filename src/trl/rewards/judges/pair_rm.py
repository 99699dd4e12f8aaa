"""PairRM of llm-blender, a pairwise judge that runs locally."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from accelerate import PartialState

from trl.rewards.judges.bases import BasePairwiseJudge, shown_pairs

_MODEL = "llm-blender/PairRM"


class PairRMJudge(BasePairwiseJudge):
    """PairRM (Jiang et al. 2023, arXiv:2306.02561), a model of 0.4 billion parameters that compares two completions.

    Raises: ImportError if llm-blender cannot be imported; its release 0.0.2 needs transformers 4.
    """

    def __init__(self) -> None:
        try:
            blender: Any = import_module("llm_blender")
        except ImportError as error:
            raise ImportError(
                f"PairRMJudge needs llm-blender, which cannot be imported ({error}). Install a release for transformers 5 with "
                "`pip install llm-blender`, or use another pairwise judge."
            ) from error
        self.blender = blender.Blender()
        self.blender.loadranker(_MODEL, device=str(PartialState().device))

    def judge(
        self,
        prompts: list[str],
        completions: list[list[str]],
        shuffle_order: bool = True,
        return_scores: bool = False,
        temperature: float = 1.0,
    ) -> list[int | float]:
        """0 or 1 for each pair; with `return_scores`, the probability that the first completion is better.

        The probability is the softmax of the model's two scores divided by `temperature`.
        """
        if not temperature > 0:
            raise ValueError(f"temperature must be > 0, got {temperature}. Use 1 for the model's own scores.")
        pairs = shown_pairs(prompts, completions, shuffle=shuffle_order)
        if not pairs:
            return []
        found = self.blender.rank(
            [pair.prompt for pair in pairs],
            [[pair.first, pair.second] for pair in pairs],
            return_scores=return_scores,
            disable_tqdm=True,
        )
        rows = zip(pairs, found, strict=True)
        if not return_scores:
            return [pair.given(int(ranks[0] > ranks[1])) for pair, ranks in rows]
        return [_first_is_better([row[pair.given(0)], row[pair.given(1)]], temperature) for pair, row in rows]


def _first_is_better(scores: Sequence[float], temperature: float) -> float:
    """The first entry of the softmax of two scores.

    >>> _first_is_better([1.0, 1.0], 0.5)
    0.5
    """
    return 0.5 + 0.5 * math.tanh((float(scores[0]) - float(scores[1])) / (2 * temperature))
