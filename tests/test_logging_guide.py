"""The metrics that the guide to logging names are logged by some method."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_metrics_of_the_tables_exist():
    text = (ROOT / "docs" / "guides" / "logging.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| metric \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [row.split("|")[1] for table in tables for row in table.splitlines()]
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    runs = json.loads((ROOT / "tests" / "recorded_interface.json").read_text(encoding="utf-8"))["metrics"]
    logged = {name for names in runs.values() for name in names.split()}
    assert len(named) > 25
    assert named - logged == set()
