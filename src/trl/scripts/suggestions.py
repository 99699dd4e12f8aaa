"""What to say about a name that nobody knows."""

import difflib
from collections.abc import Iterable

MOST = 3


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that may be meant: the one that looks most like `name`, then those that it abbreviates.

    These have its words, or begin its words with its letters. Case does not count, and hyphens are underscores.

    >>> nearest("--sise", ["size", "steps"]), nearest("epoch", ["num_train_epochs"]), nearest("x", ["size"])
    (['size'], ['num_train_epochs'], [])
    >>> nearest("lr", ["lr_scheduler_type", "learning_rate"])
    ['learning_rate', 'lr_scheduler_type']
    """
    spellings = {_plain(entry): entry for entry in known}
    wanted = _plain(name.lstrip("-"))
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


def _plain(name: str) -> str:
    return name.replace("-", "_").lower()


def _place(words: list[str], there: list[str], *, cutoff: float) -> int:
    """Where in the words of a name the first of `words` stands; -1 unless all of them do, as nearly as `cutoff`."""
    found = [difflib.get_close_matches(word, there, n=1, cutoff=cutoff) for word in words]
    return there.index(found[0][0]) if all(found) else -1
