"""What all commands share in reading arguments: short errors, unknown options first. Imports nothing heavy."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from trl.scripts.suggestions import did_you_mean


class ShortErrors(argparse.ArgumentParser):
    """A parser whose errors name the nearest choice, and come without its usage, which may fill several screens."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\nSee `{self.prog} --help` for all options.\n")


class PlainParser(ShortErrors):
    """A parser of options written out in full, which tells unknown ones before missing ones, with the nearest names."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """The options in `args`, those of the process if None.

        Raises: SystemExit with status 2, its message printed, for unknown options and for wrong values.
        """
        given = sys.argv[1:] if args is None else list(args)
        messages = unknown_arguments(unknown_to(self, given), [action.dest for action in self._actions])
        if messages:
            self.error("\n".join(messages))
        return super().parse_args(given, namespace)


def unknown_to(parser: argparse.ArgumentParser, args: Sequence[str]) -> list[str]:
    """What a parser does not know among `args`, whether or not a required option is there: it may be one mistyped.

    Raises: SystemExit for wrong values, and, with status 0, for `--help`.
    """
    if {"-h", "--help"} & set(args):
        return parser.parse_known_args(args)[1]
    with _nothing_required(parser):
        return parser.parse_known_args(args)[1]


@contextmanager
def _nothing_required(parser: argparse.ArgumentParser) -> Iterator[None]:
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parsers = [parser, *(sub for action in subparsers for sub in action.choices.values())]
    required = [action for one in parsers for action in one._actions if action.required]
    for action in required:
        action.required = False
    try:
        yield
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
