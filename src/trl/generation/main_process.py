"""Work that the main process does for all processes."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
_R = TypeVar("_R")
_STREAMS = 2**32  # random streams of one process


def process_count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def first_rng_stream() -> int:
    """The first random stream of this process: processes with one seed must not draw the same for the same query."""
    return dist.get_rank() * _STREAMS if dist.is_available() and dist.is_initialized() else 0


def any_process(value: bool) -> bool:
    """Whether it is true in any process. All must call it."""
    return any(_gathered(value))


def _gathered(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    if group is None and process_count() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def through_main(
    value: _T, make: Callable[[list[_T]], Sequence[_R]], *, meanwhile: Callable[[], None] | None = None
) -> _R:
    """This process's part of what `make` returns in the main process for the `value`s of all. All must call it.

    `meanwhile` runs in the other processes, for collective work inside `make`. An error is raised in all of them.
    """
    values, parts, failure = _gathered(value), None, None
    if process_count() == 1:
        return make(values)[0]
    if dist.get_rank() == 0:
        try:
            parts = list(make(values))
        except Exception as error:
            failure = error
    elif meanwhile is not None:
        meanwhile()
    raise_in_all(failure)
    answer: list[Any] = [None]
    dist.scatter_object_list(answer, parts, src=0)
    return answer[0]


def by_main(make: Callable[[], _R], *, meanwhile: Callable[[], None] | None = None) -> _R:
    """What `make` returns in the main process, in every process; see `through_main`."""
    return through_main(None, lambda values: [make()] * len(values), meanwhile=meanwhile)


def raise_in_all(failure: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise an error of any process in every process of the group (None: all). All of them must call it."""
    # A builtin type that takes a text: other processes may not be able to build the error itself.
    kinds = (ConnectionError, PermissionError, ValueError, RuntimeError)
    kind = next((kind for kind in kinds if isinstance(failure, kind)), RuntimeError)
    failures = _gathered(None if failure is None else (kind, str(failure)), group)
    if failure is not None:
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            kind, text = other
            raise kind(f"in process {rank}: {text}")
