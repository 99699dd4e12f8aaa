"""Work that the main process does for all processes."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from trl.checkpoints.progress import together

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
    return any(together(lambda: value))


def through_main(
    value: _T, make: Callable[[list[_T]], Sequence[_R]], *, meanwhile: Callable[[], None] | None = None
) -> _R:
    """This process's part of what `make` returns in the main process for the `value`s of all. All must call it.

    `meanwhile` runs in the other processes, for collective work inside `make`. An error is raised in all of them.
    """
    values = together(lambda: value)
    if len(values) == 1:
        return make(values)[0]
    parts: list[_R] = []

    def act() -> None:
        if dist.get_rank() == 0:
            parts.extend(make(values))
        elif meanwhile is not None:
            meanwhile()

    together(act)
    answer: list[Any] = [None]
    dist.scatter_object_list(answer, parts or None, src=0)
    return answer[0]


def by_main(make: Callable[[], _R], *, meanwhile: Callable[[], None] | None = None) -> _R:
    """What `make` returns in the main process, in every process; see `through_main`."""
    return through_main(None, lambda values: [make()] * len(values), meanwhile=meanwhile)
