"""docs/internals/architecture.md says how many functions a row passes on its way to the loss, and which of them decide something."""

import json
import re
from pathlib import Path

from tests.two_processes import ending

ARCHITECTURE = Path(__file__).parent.parent / "docs" / "internals" / "architecture.md"
WALK = re.compile(r"^\*\*[^*]*, (SFT|DPO|GRPO)\*\* \((\d+) functions in (\d+) files\):$(.*?)(?=^\*\*|^##)", re.M | re.S)


def test_the_architecture_quotes_the_traced_walks(tmp_path: Path) -> None:
    status, written = ending("tests.walks", str(tmp_path / "walks.json"))  # in a process where nothing is cached yet
    assert status == 0, written
    walks = json.loads((tmp_path / "walks.json").read_text())
    quoted = {match[1].lower(): match for match in WALK.finditer(ARCHITECTURE.read_text(encoding="utf-8"))}
    counts = {kind: f"{sum(map(len, files.values()))} in {len(files)}" for kind, files in walks.items()}
    assert {kind: f"{match[2]} in {match[3]}" for kind, match in quoted.items()} == counts, (
        "python -m tests.walks grpo lists those of grpo"
    )
    for kind, match in quoted.items():
        file, strangers, names = "", [], re.findall("`([^`]+)`", match[4])
        for name in names:
            if name.endswith(".py"):
                file = name
            elif name not in walks[kind].get(file, ()):
                strangers.append(f"{file}: {name}")
        assert len(names) > 20 and not strangers
