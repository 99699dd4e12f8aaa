"""Work that the main process does for all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
_R = TypeVar("_R")
_STREAMS = 2**32  # random streams of one process


def process_count() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def first_rng_stream() -> int:
    """The first random stream of this process: processes with one seed must not draw the same for the same query."""
    return dist.get_rank() * _STREAMS if dist.is_available() and dist.is_initialized() else 0


def any_process(value: bool) -> bool:
    """Whether it is true in any process. All must call it."""
    if process_count() == 1:
        return value
    found: list[Any] = [None] * process_count()
    dist.all_gather_object(found, value)
    return any(found)


def through_main(
    own: _T, make: Callable[[list[_T]], Sequence[_R]], *, meanwhile: Callable[[], None] | None = None
) -> _R:
    """This process's part of what `make` returns in the main process for `own` of all processes. All must call it.

    `meanwhile` runs in the other processes, for collective work inside `make`. An error in the main process is raised in all
    of them, in the others as the same builtin type or RuntimeError.
    """
    if process_count() == 1:
        return make([own])[0]
    is_main, parts, failure = dist.get_rank() == 0, None, None
    given: Any = [None] * process_count() if is_main else None
    dist.gather_object(own, given, dst=0)
    if is_main:
        try:
            parts = [("made", part) for part in make(given)]
        except Exception as error:
            failure = error
            parts = [("failed", _described(error))] * process_count()
    elif meanwhile is not None:
        meanwhile()
    answer: list[Any] = [None]
    dist.scatter_object_list(answer, parts, src=0)
    if failure is not None:
        raise failure
    how, value = answer[0]
    if how == "failed":
        kind, text = value
        raise kind(f"in the main process: {text}")
    return value


def by_main(make: Callable[[], _R], *, meanwhile: Callable[[], None] | None = None) -> _R:
    """What `make` returns in the main process, in every process; see `through_main`."""
    return through_main(None, lambda given: [make()] * len(given), meanwhile=meanwhile)


def raise_in_all(failure: Exception | None, group: Any = None) -> None:
    """Raise an error of any process in every process of the group (None: all). All of them must call it."""
    own = None if failure is None else _described(failure)
    found: list[Any] = [own]
    if group is not None or process_count() > 1:
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, own, group=group)
    if failure is not None:
        raise failure
    for rank, other in enumerate(found):
        if other is not None:
            kind, text = other
            raise kind(f"in process {rank}: {text}")


def _described(error: Exception) -> tuple[type[Exception], str]:
    """A builtin type that takes a text, and the text: other processes may not be able to build the error itself."""
    kinds = (ConnectionError, PermissionError, ValueError)
    return next((kind for kind in kinds if isinstance(error, kind)), RuntimeError), str(error)
