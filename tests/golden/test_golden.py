"""Recorded numbers of the reference (recorded/): every case agrees, or is listed with the reason why ours is right."""

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.golden.compare import compare
from tests.two_processes import ending

HERE = Path(__file__).parent
# Families of recorded cases; those of a row share a process.
BUILT = ("sft gkd reward prm cpo orpo kto bco", "dpo", "grpo rloo", "ppo_step")
DEVIATIONS = tomllib.loads((HERE / "deviations.toml").read_text())


def test_every_deviation_names_a_test_that_exists():
    for name, entry in DEVIATIONS.items():
        assert entry["reason"], name
        path, _, function = entry["test"].partition("::")
        assert f"def {function}(" in (HERE.parent / path).read_text(), name


def test_what_differs():
    """A recorded number that is absent counts; one that is ours alone does not."""
    recorded = {"steps": [{"loss": 1.0, "kl": 2.0, "nan": "nan"}], "weights": {"w": [10.0, 1.0, 0.1, 0.1]}}
    same = {"steps": [{"loss": 1.0001, "kl": 2.0001, "nan": "nan", "more": 1}], "weights": {"w": [10.001, 1.001, 0.1001, 0.1001]}}  # fmt: skip
    assert not compare(same, recorded)
    other = {"steps": [{"loss": 1.0003, "nan": 0.0}], "weights": {"w": [10.0, 1.0, 0.1004, 0.1]}}
    differing, missing = compare(other, recorded)
    assert (sorted(differing), missing) == (["step 1 loss", "step 1 nan", "weight w"], ["kl"])
    assert compare({"steps": [], "weights": same["weights"]}, recorded).differing == {
        "number of steps": "0, recorded 1"
    }


@pytest.mark.slow
@pytest.mark.parametrize("families", BUILT)
def test_recorded_cases_agree(families, tmp_path):
    report = tmp_path / "report.json"
    file = "step_ppo" if families == "ppo_step" else "trainers"
    _, written = ending("tests.golden.recorded_cases", file, str(report), *families.split(), timeout=590)
    assert report.is_file(), written
    cases = json.loads(report.read_text())
    assert {name.partition("/")[0] for name in cases} == set(families.split())
    unlisted = {name: lines for name, case in cases.items() if (lines := unlisted_differences(name, case))}
    assert not unlisted, json.dumps(unlisted, indent=1)
    prefixes = tuple(f"{family}/" for family in families.split())
    listed = [p for p, entry in DEVIATIONS.items() if p.startswith(prefixes) and not entry.get("rounding")]
    stale = [p for p in listed if not any(fnmatch(name, p) and case for name, case in cases.items())]
    assert not stale, f"these deviations differ from nothing any more: {stale}"


def unlisted_differences(name: str, case: dict[str, str]) -> dict[str, str]:
    """What differs in a case, or is missing, that no deviation lists; an entry without `only` lists everything but errors.

    The names of numbers begin with "step N " or "evaluate eval_"; `only` names what stands behind that, or a prefix of it.
    """
    entries = [entry for pattern, entry in DEVIATIONS.items() if fnmatch(name, pattern)]
    if any("only" not in entry for entry in entries) and "error" not in case:
        return {}
    prefixes = tuple(prefix for entry in entries for prefix in entry.get("only", ())) or ("\0",)
    bare = {what: re.sub(r"^(step \d+ |evaluate eval_)", "", what) for what in case}
    return {what: line for what, line in case.items() if not bare[what].startswith(prefixes)}
