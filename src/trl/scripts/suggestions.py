"""What to say about a name that nobody knows."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, or None if none does; hyphens and underscores count as equal."""
    spellings = {entry.replace("-", "_").lower(): entry for entry in known}
    wanted = name.lstrip("-").replace("-", "_").lower()
    matches = difflib.get_close_matches(wanted, spellings, n=1, cutoff=0.6)
    return spellings[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """` Did you mean prefix+name?` for the nearest known name, or an empty string."""
    match = nearest(name, known)
    return "" if match is None else f" Did you mean {prefix}{match}?"
