"""Arguments of all commands: short errors, unknown options first, with the nearest names. Imports nothing heavy."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from trl.options.secrets import redacted
from trl.options.spelling import did_you_mean

INPUT_ERRORS = (ValueError, TypeError, OSError, ImportError)  # about values, files, the Hub and extras
_MOST_CHOICES = 12  # more are left to the help text where one of them is near


class PlainParser(argparse.ArgumentParser):
    """A parser of options written out in full, with short errors, which name unknown options before missing ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        # That of Python 3.13 and older takes -1e-4 for an option.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [str(choice) for choice in action.choices or ()]
            near = did_you_mean(str(value), choices)
            if near and len(choices) > _MOST_CHOICES:
                error.message = f"invalid choice: {value!r} (of {len(choices)})."
            error.message += near
            raise

    def error(self, message: str) -> NoReturn:
        """Print the error, without the usage, which may fill several screens, and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\nSee `{self.prog} --help` for all options.\n")

    def report(self, error: Exception) -> int:
        """Print the message of an error of the input, and return exit status 2."""
        print(f"{self.prog}: error: {redacted(str(error))}", file=sys.stderr)
        return 2

    def run(self, command: Callable[[Any], int | None], args: Sequence[str] | None) -> int:
        """Call a command with the options in `args`; returns its exit status, that of `report` for `INPUT_ERRORS`."""
        options = self.parse_args(args)
        try:
            return command(options) or 0
        except INPUT_ERRORS as error:
            return self.report(error)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """The options in `args` (None: those of the process); unknown ones and wrong values exit with status 2."""
        words = sys.argv[1:] if args is None else list(args)
        if messages := unknown_arguments(self.unknown(words), [action.dest for action in self._actions]):
            self.error("\n".join(messages))
        return super().parse_args(words, namespace)

    def unknown(self, args: Sequence[str]) -> list[str]:
        """The unknown `args`, also where a required option is missing: it may be mistyped."""
        subparsers = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [self, *(sub for action in subparsers for sub in action.choices.values())]
        required = [action for one in parsers for action in one._actions if action.required]
        for action in required:
            action.required = bool({"-h", "--help"} & set(args))  # the usage shows it
        try:
            return self.parse_known_args(args)[1]
        finally:
            for action in required:
                action.required = True


def unknown_arguments(tokens: list[str], known: Iterable[str]) -> list[str]:
    """A message for each unknown option in `tokens`, or for the stray values if there is none."""
    names = list(known)
    flags = [token.split("=")[0] for token in tokens if token.startswith("-")]
    if tokens and not flags:
        return [f"Unexpected arguments: {' '.join(tokens)}. Values follow the name of an option."]
    return [f"Unknown option {flag}.{did_you_mean(flag, names, prefix='--')}" for flag in flags]
