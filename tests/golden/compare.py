"""Compares the numbers of a run with recorded ones."""

import math
from typing import Any, NamedTuple

RELATIVE, ABSOLUTE = 1e-4, 1e-5
ROUNDED = 1.1e-4  # "loss" is logged with four decimals
WEIGHTS = 2e-4  # of a final weight, relative to its size; ten times as much of its change


class Comparison(NamedTuple):
    """What differs, as lines, and the names of what the run did not give."""

    differing: dict[str, str]
    missing: list[str]

    def __bool__(self) -> bool:
        return bool(self.differing or self.missing)


def close(value: Any, recorded: Any, absolute: float) -> bool:
    if isinstance(value, list) and isinstance(recorded, list):
        pairs = zip(value, recorded, strict=False)
        return len(value) == len(recorded) and all(close(*pair, absolute) for pair in pairs)
    if any(not isinstance(part, int | float) for part in (value, recorded)):
        return value == recorded
    return math.isclose(value, recorded, rel_tol=RELATIVE, abs_tol=absolute)


def weights_close(value: list, recorded: list) -> bool:
    """Norm and projection against the size of the tensor; those of its change against the size of the change."""
    size, change = WEIGHTS * max(recorded[0], 1e-12), 10 * WEIGHTS * recorded[2] + 1e-6
    limits = (size, size + 1e-6, change, change)
    return all(abs(one - other) <= limit for one, other, limit in zip(value, recorded, limits, strict=True))


def compare(result: dict[str, Any], recorded: dict[str, Any]) -> Comparison:
    """Every recorded number has to be there; what the run gives beside them does not matter."""
    differing, missing = {}, set()
    if len(result["steps"]) != len(recorded["steps"]):
        differing["number of steps"] = f"{len(result['steps'])}, recorded {len(recorded['steps'])}"
    places = [f"step {number} " for number in range(1, len(recorded["steps"]) + 1)]
    rows = list(zip(places, result["steps"], recorded["steps"], strict=False))
    rows += [("evaluate ", result.get("eval", {}), recorded.get("eval", {}))]
    for place, ours, theirs in rows:
        missing |= set(theirs) - set(ours)
        for name in set(theirs) & set(ours):
            if not close(ours[name], theirs[name], ROUNDED if name == "loss" else ABSOLUTE):
                differing[place + name] = f"{ours[name]}, recorded {theirs[name]}"
    for name, weight in recorded["weights"].items():
        if name not in result["weights"]:
            missing.add(f"weight {name}")
        elif not weights_close(result["weights"][name], weight):
            differing[f"weight {name}"] = f"{result['weights'][name]}, recorded {weight}"
    return Comparison(differing, sorted(missing))


def compare_case(result: dict[str, Any], case: dict[str, Any]) -> Comparison:
    """With the recording under transformers 5, if there is one and it is nearer."""
    results = [compare(result, case[kind]) for kind in ("result", "result_tf5") if kind in case]
    return min(results, key=lambda found: (bool(found), len(found.differing)))
