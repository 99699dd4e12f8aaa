"""Recorded numbers of the reference (../shared/golden): every case agrees, or is listed with the reason why ours is right."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BUILT = ("sft",)
DEVIATIONS = tomllib.loads((HERE / "deviations.toml").read_text())


def test_every_deviation_names_a_test_that_exists():
    for name, entry in DEVIATIONS.items():
        assert entry["reason"], name
        path, _, function = entry["test"].partition("::")
        assert f"def {function}(" in (HERE.parent / path).read_text(), name


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILT)
def test_recorded_cases_agree(family, shared, tmp_path):
    golden = shared / "golden"
    if not golden.is_dir():
        pytest.skip(f"{golden} is not present on this machine")
    report = tmp_path / "report.json"
    command = [
        sys.executable, str(golden / "check.py"), "--python", sys.executable, "--golden", str(golden / "golden_public.json"),
        "--cases", f"{family}/*", "--report", str(report), "--traces",
    ]  # fmt: skip
    environment = {**os.environ, "GOLDEN_INJECT": "rollout", "PYTHONPATH": str(HERE.parents[1] / "src")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert report.is_file(), run.stdout + run.stderr
    cases = json.loads(report.read_text())["cases"]
    assert cases
    bad = {name for name, case in cases.items() if case["status"] != "ok"}
    assert bad == {name for name in DEVIATIONS if name.startswith(f"{family}/")}, run.stdout
