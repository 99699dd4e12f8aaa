"""Less output on the command line."""

import logging
import warnings
from typing import TextIO

from rich.logging import RichHandler


def init_zero_verbose() -> None:
    """Show errors only: log messages below that level are dropped, warnings go to the log (at debug level)."""
    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR)
    warnings.showwarning = _log_warning


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logging.getLogger("py.warnings").debug("%s:%d: %s: %s", filename, lineno, category.__name__, message)
