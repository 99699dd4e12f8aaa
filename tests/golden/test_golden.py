"""Recorded numbers of the reference (../shared/golden): every case agrees, or is listed with the reason why ours is right."""

import json
import re
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("families", BUILT)
def test_recorded_cases_agree(families, shared, tmp_path):
    golden = shared / "golden"
    if not golden.is_dir():
        pytest.skip(f"{golden} is not present on this machine")
    report = tmp_path / "report.json"
    file = "golden_ppo_public.json" if families == "ppo_step" else "golden_public.json"
    prefixes = tuple(f"{family}/" for family in families.split())
    _, written = ending(
        "tests.golden.recorded_cases", str(golden / "check.py"), "--python", sys.executable, "--golden", str(golden / file),
        "--cases", ",".join(f"{prefix}*" for prefix in prefixes), "--report", str(report), "--traces", timeout=590,
    )  # fmt: skip
    assert report.is_file(), written
    cases = json.loads(report.read_text())["cases"]
    assert {name.partition("/")[0] for name in cases} == set(families.split())
    unlisted = {name: found for name, case in cases.items() if (found := unlisted_differences(name, case))}
    assert not unlisted, written
    known = [p for p, entry in DEVIATIONS.items() if p.startswith(prefixes) and not entry.get("rounding")]
    stale = [p for p in known if not any(fnmatch(n, p) and c["status"] != "ok" for n, c in cases.items())]
    assert not stale, f"these deviations differ from nothing any more: {stale}"


def unlisted_differences(name: str, case: dict) -> list[str]:
    """What differs in a case, or is absent, that no deviation lists; an entry without `only` lists everything.

    The log's keys begin with "step N " or "evaluate eval_"; `only` names what stands behind that, or a prefix of it.
    """
    if case["status"] == "ok":
        return []
    entries = [entry for pattern, entry in DEVIATIONS.items() if fnmatch(name, pattern)]
    if any("only" not in entry for entry in entries):
        return []
    listed = tuple(prefix for entry in entries for prefix in entry["only"])
    differing = [re.sub(r"^(step \d+ |evaluate eval_)", "", what) for what, *_ in case["diffs"]]
    return sorted({what for what in [*differing, *case["missing"]] if not what.startswith(listed or ("\0",))})
