"""Arguments of all commands: short errors, unknown options first, with the nearest names. Imports nothing heavy."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

MOST = 3


class PlainParser(argparse.ArgumentParser):
    """A parser of options written out in full, with short errors, which name unknown options before missing ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        """Print the error, without the usage, which may fill several screens, and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\nSee `{self.prog} --help` for all options.\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """The options in `args`, those of the process if None; exits with status 2 for unknown options and wrong values."""
        given = sys.argv[1:] if args is None else list(args)
        if messages := unknown_arguments(self.unknown(given), [action.dest for action in self._actions]):
            self.error("\n".join(messages))
        return super().parse_args(given, namespace)

    def unknown(self, args: Sequence[str]) -> list[str]:
        """The unknown `args`, also where a required option is missing: it may be mistyped."""
        subparsers = [each for each in self._actions if isinstance(each, argparse._SubParsersAction)]
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


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that may be meant: the most similar, then those that `name` abbreviates.

    >>> nearest("--sise", ["size", "steps"]), nearest("epoch", ["num_train_epochs"]), nearest("x", ["size"])
    (['size'], ['num_train_epochs'], [])
    >>> nearest("lr", ["lr_scheduler_type", "learning_rate"])
    ['learning_rate', 'lr_scheduler_type']
    """
    spellings = {entry.replace("-", "_").lower(): entry for entry in known}
    wanted = name.lstrip("-").replace("-", "_").lower()
    alike = difflib.get_close_matches(wanted, spellings, n=1)
    initials = [each for each in spellings if "".join(word[:1] for word in each.split("_")) == wanted]
    longer = [each for each in spellings if wanted and f"_{wanted}" in f"_{each}"]
    return [spellings[match] for match in dict.fromkeys([*alike, *initials, *longer])][:MOST]


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """` Did you mean prefix+name?` for the nearest known names, or an empty string."""
    matches = [prefix + match for match in nearest(name, known)]
    return f" Did you mean {' or '.join(matches)}?" if matches else ""
