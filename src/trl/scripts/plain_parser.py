"""Arguments of all commands: short errors, unknown options first, with the nearest names. Imports nothing heavy."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn


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


MOST = 3


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that may be meant: the one that looks most like `name`, then those that it abbreviates.

    These have its words, or begin its words with its letters. Case does not count, and hyphens are underscores.

    >>> nearest("--sise", ["size", "steps"]), nearest("epoch", ["num_train_epochs"]), nearest("x", ["size"])
    (['size'], ['num_train_epochs'], [])
    >>> nearest("lr", ["lr_scheduler_type", "learning_rate"])
    ['learning_rate', 'lr_scheduler_type']
    """
    spellings = {entry.replace("-", "_").lower(): entry for entry in known}
    wanted = name.lstrip("-").replace("-", "_").lower()
    alike = difflib.get_close_matches(wanted, spellings, n=1, cutoff=0.6)
    initials = [
        entry for entry in spellings if "".join(word[:1] for word in entry.split("_")) == wanted != entry
    ]
    cutoff = 1.0 if alike else 0.8
    places = [(_place(wanted.split("_"), entry.split("_"), cutoff=cutoff), entry) for entry in spellings]
    longer = [entry for place, entry in sorted(places, key=lambda found: found[0]) if place >= 0]
    return [spellings[match] for match in dict.fromkeys([*alike, *initials, *longer])][:MOST]


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """` Did you mean prefix+name?` for the nearest known names, or an empty string."""
    matches = [prefix + match for match in nearest(name, known)]
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def _place(words: list[str], there: list[str], *, cutoff: float) -> int:
    """Where in the words of a name the first of `words` stands; -1 unless all of them do, as nearly as `cutoff`."""
    found = [difflib.get_close_matches(word, there, n=1, cutoff=cutoff) for word in words]
    return there.index(found[0][0]) if all(found) else -1
