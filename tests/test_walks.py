"""docs/internals/architecture.md says how many functions a row passes on its way to the loss: as many as are traced."""

import re
from pathlib import Path

from tests.two_processes import ending

ARCHITECTURE = Path(__file__).parent.parent / "docs" / "internals" / "architecture.md"
QUOTED = re.compile(r"^\*\*.*, (SFT|DPO|GRPO)\*\* \((\d+ functions in \d+ files)\)")


def test_the_architecture_quotes_the_traced_walks() -> None:
    status, traced = ending("tests.walks")  # in a process of its own, where nothing is cached yet
    assert status == 0, traced
    lines = ARCHITECTURE.read_text(encoding="utf-8").splitlines()
    quoted = [f"{match[1].lower()}: {match[2]}" for line in lines if (match := QUOTED.match(line))]
    assert [line for line in traced.splitlines() if " functions in " in line] == quoted, (
        "python -m tests.walks grpo lists those of grpo"
    )
