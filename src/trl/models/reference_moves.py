"""Callbacks that move the reference while training goes on, and the one copy that they move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch

from trl.models.reference import FrozenModel, Reference


@runtime_checkable
class MovesReference(Protocol):
    """A callback that writes into a reference's weights, which a trainer hands to it."""

    @property
    def moves_reference(self) -> bool:
        """Whether it is set to do so."""
        ...

    def use_reference(self, reference: torch.nn.Module) -> None:
        """Take the module to write into."""


def lend_reference(callbacks: Iterable[Any], reference: Reference | None) -> FrozenModel | None:
    """Hand the frozen copy to the callbacks that move it; None where none does.

    What comes back must be part of every checkpoint (`save`, `load`). Call it once the reference is prepared.

    Raises: ValueError for a reference that cannot move, or that several would move.
    """
    movers = _movers(callbacks)
    if not movers:
        return None
    if len(movers) > 1:
        names = " and ".join(type(callback).__name__ for callback in movers)
        raise ValueError(
            f"{names} move the reference's weights, one is allowed: each would undo what the others write. Leave out "
            "sync_ref_model, or all callbacks that move it but one (BEMACallback with update_ref_model=False moves nothing)."
        )
    if not isinstance(reference, FrozenModel):
        raise ValueError(
            f"{type(movers[0]).__name__} moves the reference's weights, and this run has {_named(reference)}, expected a "
            "model of its own. Train without an adapter and without precomputed or absent reference, or leave the "
            "callback (sync_ref_model) out."
        )
    for callback in movers:
        callback.use_reference(reference.module)
    return reference


def check_moves(callbacks: Iterable[Any], reference: Reference | None, policy: Any) -> None:
    """Check that a reference that callbacks are to move has the policy's parameters; before either is sharded or wrapped.

    Raises: ValueError where names or shapes differ.
    """
    movers = _movers(callbacks)
    if not movers or not isinstance(reference, FrozenModel):
        return
    ours, theirs = (
        {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
        for model in (policy, reference.module)
    )
    different = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if different:
        raise ValueError(
            f"{type(movers[0]).__name__} moves the reference's weights towards the model's, which needs the same parameters in "
            f"both, and {len(different)} differ in name or shape, such as {different[:3]}. Choose a ref_model of the model's own "
            "architecture and train without an adapter, or leave the callback (sync_ref_model) out."
        )


def _movers(callbacks: Iterable[Any]) -> list[MovesReference]:
    return [
        callback
        for callback in callbacks
        if isinstance(callback, MovesReference) and callback.moves_reference
    ]


def _named(reference: Reference | None) -> str:
    return "none" if reference is None else f"a reference of kind {type(reference).__name__}"
