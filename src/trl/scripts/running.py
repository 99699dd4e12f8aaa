"""Running a script from the command line: errors of its input are one message and exit status 2."""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trl.scripts.config_file import ConfigFile
from trl.scripts.parser import TrlParser
from trl.scripts.plain_parser import INPUT_ERRORS


class Terminated(SystemExit):
    """The process got SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class CommandError(ValueError):
    """What was asked for cannot be done; the message says why and what to do, and is all that the user is shown."""


@contextmanager
def reporting_input_errors() -> Iterator[None]:
    """Turn `INPUT_ERRORS` into `CommandError`; for what happens before training."""
    try:
        yield
    except INPUT_ERRORS as error:
        raise CommandError(str(error)) from error


def run_script(
    parser: TrlParser, main: Callable[..., object], args: Sequence[str] | None = None, *,
    config: ConfigFile | None = None,
) -> int:  # fmt: skip
    """Parse `args` (None: the process's), call `main` with the dataclasses, and return the exit status.

    `config` is a config file that was read already. With TRL_TRACEBACK=1 errors of the input show their traceback.
    """
    try:
        with reporting_input_errors():
            read = None if config is None else parser.parse_with(list(args or ()), config)
            parsed = parser.parse_args_and_config(args) if read is None else read
        with notes_shown(), sigterm_raises():
            main(*parsed)
    except CommandError as error:
        if os.environ.get("TRL_TRACEBACK") == "1":
            raise
        return parser.report(error)
    except KeyboardInterrupt as stop:  # each of several processes would show where it was
        has_note = hasattr(stop, "__notes__")  # a training said how far it came
        if not has_note and os.environ.get("RANK", "0") == "0":
            print(f"{parser.prog}: interrupted, no step was trained.", file=sys.stderr)
        return 130
    except Terminated:
        return 128 + signal.SIGTERM
    return 0


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` where SIGTERM finds this process; its forks end as they would without."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, process = signal.getsignal(signal.SIGTERM), os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class NotesHandler(logging.StreamHandler):
    """Writes to stderr, with progress bars taken away meanwhile: a note gets a line of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)


@contextmanager
def notes_shown() -> Iterator[None]:
    """Let the library's notes (rows, tokens, what was truncated) reach the terminal of the first process."""
    logger = logging.getLogger("trl")
    if logger.level != logging.NOTSET or int(os.environ.get("RANK", "0")) != 0:
        yield
        return
    handler = NotesHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    if logging.getLogger().handlers:  # warnings have a way out already
        handler.addFilter(lambda record: record.levelno < logging.WARNING)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def require_new_folder(out: str) -> None:
    """Raise ValueError where `out` is there and is not an empty folder."""
    if Path(out).exists() and not (Path(out).is_dir() and not any(Path(out).iterdir())):
        raise ValueError(f"out must be a new or empty folder, got '{out}'. Name another one.")


def init_zero_verbose() -> None:
    """Show errors only: log messages below that level are dropped, warnings go to the log (at debug level)."""
    from rich.logging import RichHandler

    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR)
    warnings.showwarning = lambda message, category, filename, lineno, file=None, line=None: logging.getLogger(
        "py.warnings"
    ).debug("%s:%d: %s: %s", filename, lineno, category.__name__, message)
