"""The reference's `check.py` with its runner in the same process: `-m tests.golden.recorded_cases CHECK_PY OPTIONS...`.

It would start the runner as a program, which imports for ten seconds and collects garbage among all that it imported.
"""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace


def main(check: str) -> None:
    os.environ["GOLDEN_INJECT"] = "rollout"
    spec = importlib.util.spec_from_file_location("golden_runner", Path(check).with_name("runner.py"))
    assert spec is not None and spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)

    def in_this_process(command: list[str], **_: object) -> SimpleNamespace:
        runner.main(*command[2:])
        return SimpleNamespace(returncode=0)

    subprocess.run = in_this_process  # type: ignore[assignment]
    runpy.run_path(check, run_name="__main__")


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
