"""`trl ...` in a fork of the test's process, which has imported the library: ten seconds sooner than a process of its own."""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

from trl.cli.main import main


def fork(work: Callable[[], int | None], *files: int) -> int:
    """The id of a fork that works with `files` as its input, output and errors, and ends with the status of its work."""
    child = os.fork()
    if child:
        return child
    status: object = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(400)  # where the test has failed meanwhile
        logging.getLogger().handlers.clear()  # pytest's
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        status = work()
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        for file in (sys.stdout, sys.stderr):
            with suppress(OSError):
                file.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


def trl(words: Sequence[str]) -> int:
    """The status of `trl WORDS`."""
    sys.argv = ["trl", *words]
    return main()
