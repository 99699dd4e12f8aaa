"""What one process does for all processes of a run: it is given what each has, and gives each its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
_R = TypeVar("_R")
_STREAMS = 2**32  # random streams of one process


def process_count() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def first_rng_stream() -> int:
    """The first random stream of this process: processes that share a seed must not draw the same for the same query."""
    ready = dist.is_available() and dist.is_initialized()
    return dist.get_rank() * _STREAMS if ready else 0


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
    """This process's part of what the main process makes of `own` of all of them. All must call it.

    `meanwhile` is what the others do for it: their part in what all have to do together within `make`.
    What goes wrong there is raised in every process: elsewhere than there as an error of the same kind, or as RuntimeError.
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
            parts = [("failed", (_known(error), str(error)))] * process_count()
    elif meanwhile is not None:
        meanwhile()
    answer: list[Any] = [None]
    dist.scatter_object_list(answer, parts, src=0)
    if failure is not None:
        raise failure
    how, value = answer[0]
    if how == "failed":
        kind, words = value
        raise kind(f"in the main process: {words}")
    return value


def by_main(make: Callable[[], _R], *, meanwhile: Callable[[], None] | None = None) -> _R:
    """What the main process makes, in every process; see `through_main`."""
    return through_main(None, lambda given: [make()] * len(given), meanwhile=meanwhile)


def raise_in_all(failure: Exception | None, group: Any = None) -> None:
    """Raise in every process what went wrong in any of them: elsewhere as in `through_main`. All of the group (None: all there are)
    must call it."""
    if group is None and process_count() == 1:
        if failure is not None:
            raise failure
        return
    found: list[Any] = [None] * dist.get_world_size(group)
    own = None if failure is None else (_known(failure), str(failure))
    dist.all_gather_object(found, own, group=group)
    if failure is not None:
        raise failure
    for rank, other in enumerate(found):
        if other is not None:
            kind, words = other
            raise kind(f"in process {rank}: {words}")


def _known(error: Exception) -> type[Exception]:
    """The kind of error that other processes raise: one that takes a text alone."""
    kinds = (ConnectionError, PermissionError, ValueError)
    return next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
