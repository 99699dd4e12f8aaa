"""Sharded state that is written beside training: a copy on the CPU, and a thread in each process that writes it."""

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, SavePlanner, StorageWriter, save
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from trl.checkpoints.wholeness import CheckpointError

logger = logging.getLogger(__name__)


class Background:
    """The writes of a run, one at a time. All processes must make the same calls.

    `torch.distributed.checkpoint.async_save` in two parts: several states and what follows them are one write, in one
    thread, because the processes must reach its collectives in the same order.
    """

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that a process waits for the others' parts."""
        group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")  # training uses the other one
        self._group, pinned = cast(dist.ProcessGroup, group), torch.cuda.is_available()
        self._stager = DefaultStager(StagingOptions(pinned, False, False, pinned))
        # A thread begins on the first GPU, where torch's writer would take memory.
        begin = partial(torch.cuda.set_device, torch.cuda.current_device()) if pinned else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=begin)
        self._staged: list[tuple[STATE_DICT_TYPE, StorageWriter]] = []
        self._write: Future[None] | None = None

    def stage(
        self, state_dict: STATE_DICT_TYPE, *, storage_writer: StorageWriter, planner: SavePlanner | None = None
    ) -> None:
        """Copy a state to the CPU, in memory that the next checkpoint uses again; stands in for torch's `save`."""
        self._staged.append((cast(STATE_DICT_TYPE, self._stager.stage(state_dict)), storage_writer))

    def write(self, folder: Path, finish: Callable[[dist.ProcessGroup], None]) -> None:
        """Write in the background what was staged for the checkpoint in `folder`, then `finish` it."""
        staged, self._staged = self._staged, []

        def work() -> None:
            try:
                for state, writer in staged:
                    save(state, storage_writer=writer, process_group=self._group)
                finish(self._group)
            except (Exception, CheckpointException) as error:
                shutil.rmtree(folder, ignore_errors=True)
                reason = (str(error).strip() or repr(error)).splitlines()[-1]
                raise CheckpointError(
                    f"{folder.name} could not be written (async_save): {reason}. Earlier checkpoints are whole."
                ) from error

        self._write = self._pool.submit(work)

    def wait(self) -> None:
        """Wait for the last write, and forget what no write took. Raises: CheckpointError, once, if it failed."""
        self._staged, write, self._write = [], self._write, None
        if write is not None:
            write.result()

    def close(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last write, and free the copies. After another error, one of the write is a warning."""
        try:
            self.wait()
        except CheckpointError as error:
            if kind is None:
                raise
            logger.warning("%s", error)
        finally:
            self._pool.shutdown()
            self._stager.close()
            dist.destroy_process_group(self._group)
