"""A packed row cut into equal pieces of tokens, one for each process of a `SequenceGroup`, and results put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trl.models.packed.layout import Inputs, ModelBatch, ScoredPositions
from trl.models.packed.sequence_group import SequenceGroup, SharedRow

_SUMS = ("total", "entropy_total")  # of results; others are of scored positions


class Places(NamedTuple):
    """Positions of the whole row `(K,)` by their processes: `here` are the numbers of this one's, in `(K,)`.

    `counts`: how many each process has. `order`: where each position is among those of all processes.
    """

    here: Tensor
    counts: list[int]
    order: Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """This process's piece of a packed row: `rows`, in which scored positions are those of the piece."""

    group: SequenceGroup
    whole: ModelBatch
    rows: ModelBatch
    scored: Places

    @classmethod
    def of(cls, whole: ModelBatch, group: SequenceGroup, *, pad_token_id: int) -> Piece:
        """Cut a row with a segment table. Raises: ValueError for arguments of the model that belong to no token."""
        tokens = whole.width
        width, first = group.width(tokens), group.rank * group.width(tokens)
        places = _places(whole.scored.source, group, width)
        source, target, sequence = (
            positions[places.here] for positions in (whole.scored.source, whole.scored.target, whole.scored.sequence)
        )
        real = whole.real_tokens
        rows = replace(
            whole,
            inputs={name: _cut(name, value, whole, group, pad_token_id) for name, value in whole.inputs.items()},
            scored=ScoredPositions(source - first, target, sequence),
            real_tokens=real[(real >= first) & (real < first + width)] - first,
            sequence_lengths=group.cut(whole.sequence_lengths, 0),
            shared=SharedRow(group, tokens),
        )
        return cls(group, whole, rows, places)

    def places(self, positions: Tensor) -> tuple[Tensor, Places]:
        """Those of some positions `(K,)` of the whole row that are in this piece, as its own, and their places."""
        places = _places(positions, self.group, self.rows.width)
        return positions[places.here] - self.group.rank * self.rows.width, places

    def gather(self, values: Tensor, places: Places | None = None) -> Tensor:
        """The values of positions (None: the scored ones) of all processes `(K, ...)`, in the order of the row."""
        places = places or self.scored
        return self.group.gather(values, places.counts)[places.order]

    def gather_results(self, results: Inputs) -> Inputs:
        """Results of scored positions, and their sums, of all processes."""

        def gathered(name: str, value: Tensor | None) -> Tensor | None:
            if value is None or name == "aux_loss":  # of the whole row already
                return value
            return self.group.sum(value) if name in _SUMS else self.gather(value)

        return {name: gathered(name, value) for name, value in results.items()}

    def loss_of_piece(self, loss_of: Callable[..., Any]) -> Callable[..., Any]:
        """`loss_of(..., rows)` of scored positions of the whole row, for those of this piece."""
        here = self.scored.here
        return lambda *values: loss_of(*values[:-1], here[values[-1]])

    def all_tokens(self, values: Tensor) -> Tensor:
        """Values `(n, ...)` of the piece's tokens of all processes `(N, ...)`."""
        return self.group.gather(values, [len(values)] * self.group.size)[: self.whole.width]


def _places(positions: Tensor, group: SequenceGroup, width: int) -> Places:
    owners = positions // width
    by_owner = owners.argsort(stable=True)
    counts = torch.bincount(owners, minlength=group.size).tolist()
    start = sum(counts[: group.rank])
    return Places(by_owner[start : start + counts[group.rank]], counts, by_owner.argsort())


def _cut(name: str, value: Any, whole: ModelBatch, group: SequenceGroup, pad_token_id: int) -> Any:
    if name == "attention_mask":
        return group.marked(value, whole.width)
    if not isinstance(value, Tensor) or value.shape[:2] != (1, whole.width):
        raise ValueError(f"a batch has {name!r}, which cannot be cut into pieces of tokens. Use sp_size=1.")
    return group.cut(value, 1, filler=pad_token_id if name == "input_ids" else 0)


# ---- random numbers as those of one process


def noise_of_piece(like: Tensor, shared: SharedRow | None) -> Tensor:
    """Uniform noise in [-1, 1) for values `(1, n, H)` of a piece: its part of the noise of the whole row."""
    if shared is None:
        return torch.empty_like(like).uniform_(-1, 1)
    return shared.group.cut(like.new_empty((1, shared.tokens, *like.shape[2:])).uniform_(-1, 1), 1)


def share_dropout(model: nn.Module, group: SequenceGroup) -> None:
    """Let dropouts of a piece's values `(1, n, ...)` draw for all pieces, also in a checkpointed layer's second run."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.forward = partial(_dropped, module, group)  # pyright: ignore[reportAttributeAccessIssue]


def _dropped(module: nn.Dropout, group: SequenceGroup, values: Tensor) -> Tensor:
    if not module.training or not module.p or values.ndim != 3 or len(values) != 1:
        return F.dropout(values, module.p, module.training)
    factors = F.dropout(values.new_ones((1, values.shape[1] * group.size, *values.shape[2:])), module.p)
    return values * group.cut(factors, 1)
