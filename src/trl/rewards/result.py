"""The scores of a batch of rollouts by every source, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trl.tensors.reduce import Weighted, weighted

_SCORE_OF = "score_of_"


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Scores `(B, S)` of B rollouts by S sources, float64 on the CPU, NaN where a source has no opinion.

    `nones` counts the rows on which a source had no opinion, `failures` those it was asked about in vain (they are NaN,
    too, and not counted among `nones`).
    """

    names: tuple[str, ...]
    scores: Tensor
    weights: Tensor
    nones: Mapping[str, int]
    failures: Mapping[str, int]

    @property
    def rewards(self) -> Tensor:
        """The weighted sum `(B,)` of the opinions there are; NaN for a row on which no source has one."""
        return combine(self.scores, self.weights)

    @property
    def unscored(self) -> Tensor:
        """Rows on which no source has an opinion: bool `(B,)`."""
        return self.scores.isnan().all(dim=1)

    def metrics(self) -> dict[str, float]:
        """`rewards/<name>/mean` and `/std` over the rows of this process, as `reward_metrics` gives them."""
        return reward_metrics(self.names, self.scores)


def combine(scores: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the opinions of each row: `(B, S), (S,) -> (B,)`, NaN where there is none.

    A source without an opinion adds nothing, whatever its weight.
    """
    silent = scores.isnan()
    total = torch.where(silent, 0.0, scores * weights).sum(dim=1)
    return torch.where(silent.all(dim=1), torch.nan, total)


def reward_metrics(names: Sequence[str], scores: Tensor) -> dict[str, float]:
    """Mean and standard deviation of each source's opinions: `rewards/<name>/mean`, `rewards/<name>/std`.

    `scores (N, S)` are the rows of one process or of all; the deviation divides by n - 1, as `torch.std` does. NaN where
    there are too few opinions: none for a mean, one for a deviation.
    """
    found: dict[str, float] = {}
    for name, column in zip(names, scores.unbind(dim=1), strict=True):
        opinions = column[~column.isnan()]
        found[f"rewards/{name}/mean"] = opinions.mean().item()
        found[f"rewards/{name}/std"] = opinions.std().item() if len(opinions) > 1 else float("nan")
    return found


def source_columns(result: RewardResult) -> dict[str, Tensor]:
    """The scores of each source `(B,)`, NaN where it gave none, as columns of an `Experience`."""
    return {f"{_SCORE_OF}{number}": column for number, column in enumerate(result.scores.unbind(dim=1))}


def source_table(columns: Mapping[str, Tensor], sources: Sequence[str]) -> list[Tensor]:
    """The columns of `source_columns` in the order of the sources."""
    return [columns[f"{_SCORE_OF}{number}"] for number in range(len(sources))]


def source_means(columns: Mapping[str, Tensor], sources: Sequence[str]) -> dict[str, Weighted]:
    """The documented `rewards/<name>/mean`, over the rows that a source scored."""
    table = zip(sources, source_table(columns, sources), strict=True)
    return {f"rewards/{name}/mean": weighted(column, ~column.isnan()) for name, column in table}
