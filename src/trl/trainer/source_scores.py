"""What each reward source said of a batch of rollouts, as columns beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trl.rewards.result import RewardResult
from trl.tensors.reduce import Weighted, weighted

_SCORE_OF = "score_of_"


def source_columns(result: RewardResult) -> dict[str, Tensor]:
    """The scores of each source `(B,)`, NaN for no opinion, by the names of columns."""
    return {f"{_SCORE_OF}{number}": column for number, column in enumerate(result.scores.unbind(dim=1))}


def source_table(columns: Mapping[str, Tensor], sources: Sequence[str]) -> list[Tensor]:
    """The columns of `source_columns` in the order of the sources."""
    return [columns[f"{_SCORE_OF}{number}"] for number in range(len(sources))]


def source_means(columns: Mapping[str, Tensor], sources: Sequence[str]) -> dict[str, Weighted]:
    """The documented `rewards/<name>/mean`, over the rows on which a source has an opinion."""
    table = zip(sources, source_table(columns, sources), strict=True)
    return {f"rewards/{name}/mean": weighted(column, ~column.isnan()) for name, column in table}
