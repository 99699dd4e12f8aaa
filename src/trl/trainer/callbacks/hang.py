"""A training in which nothing happens any more ends, and says where its processes stood."""

import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

STATUS = 124  # of a process that ended for it, as of `timeout`
GRACE = 5.0  # seconds without another process that writes, too
STACKS = "stacks.txt"


class EndsHangs(TrainerCallback):
    """Ends the process after `hang_timeout` seconds without progress, with the stacks of its threads in `stacks.txt`.

    Progress is a micro-batch, an optimiser step, a batch of an evaluation, a log or a checkpoint. Processes wait for
    each other, so that all end within the time, and their stacks are in one file of the output folder.
    """

    def __init__(self, seconds: float | None) -> None:
        """Watch for so many seconds; None: not at all."""
        self._seconds, self._last, self._step = seconds, time.monotonic(), 0
        self._ended, self._thread = threading.Event(), threading.Thread()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Begin to watch."""
        self.stop()
        if self._seconds is None:
            return
        self._ended = threading.Event()
        self._note(args, state, control)
        path, rank = Path(args.output_dir or ".") / STACKS, f"process {args.process_index} of {args.world_size}"
        self._thread = threading.Thread(target=self._watch, args=(self._ended, self._seconds, path, rank), daemon=True)
        self._thread.start()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """The time after a training is not watched."""
        self.stop()

    def stop(self) -> None:
        """Watch no longer, also after an error or an interruption. A process that ends already does so as a hang.

        The other processes may end a moment earlier, which is an error in a thread that waits for them.
        """
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _note(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._last, self._step = time.monotonic(), state.global_step

    on_step_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_log = on_save = _note

    def _watch(self, ended: threading.Event, seconds: float, path: Path, rank: str) -> None:
        while not ended.wait(min(1.0, seconds / 4)):
            if time.monotonic() - self._last > seconds:
                self._end(path, rank)

    def _end(self, path: Path, rank: str) -> None:
        place = f"{rank} on {socket.gethostname()} (pid {os.getpid()}) after step {self._step}"
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = [f"==== {place}: no progress for {self._seconds:g} s\n"]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                parts += [f"-- thread {names.get(ident, ident)}\n", *traceback.format_stack(frame)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, "".join(parts).encode())  # in one call: the stacks of another process come before or after
            print(f"No progress for {self._seconds:g} s (hang_timeout): {place} ends. Stacks: {path}", file=sys.stderr)
            sys.stderr.flush()
            size, end = 0, time.monotonic() + GRACE
            while time.monotonic() < end:  # all end together: one alone would end others with an error
                if path.stat().st_size != size:
                    size, end = path.stat().st_size, time.monotonic() + GRACE
                time.sleep(0.05)
        finally:
            os._exit(STATUS)
