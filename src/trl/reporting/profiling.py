"""Wall-clock seconds of named parts of a training step, sent to the trackers that the run reports to."""

import functools
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from trl.reporting.trackers import log_scalars

_TRACKERS = ("wandb", "mlflow")


@contextmanager
def profiling_context(trainer: Trainer, name: str) -> Generator[None, None, None]:
    """Time the block and log it as `profiling/Time taken: <trainer class>.<name>`, in seconds, on the main process.

    Only wandb and mlflow take values between two training logs; a run that reports to neither times nothing. On an
    accelerator the time is that of the calls, not of the kernels that they queued.
    """
    report_to: Any = trainer.args.report_to  # a list of names, once TrainingArguments has read it
    if not any(tracker in report_to for tracker in _TRACKERS):
        yield
        return
    start = time.perf_counter()
    yield
    if trainer.accelerator.is_main_process:
        metric = f"profiling/Time taken: {type(trainer).__name__}.{name}"
        values = {metric: time.perf_counter() - start}
        log_scalars(values, report_to, step=trainer.state.global_step)


def profiling_decorator(func: Callable) -> Callable:
    """Time each call of a trainer's method with `profiling_context`, under the method's name."""

    @functools.wraps(func)
    def timed(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        with profiling_context(self, func.__name__):
            return func(self, *args, **kwargs)

    return timed
