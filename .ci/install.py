"""Installs this project with pip and shows how far it is: `python .ci/install.py '.[plot]'` in the target environment."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

SILENT_SECONDS = 15  # between two lines where the output is no terminal
FOUND_SHARE = 0.3  # of the time: packages are found and downloaded; then they are unpacked


class Progress:
    """Share of the work that is done, from pip's own lines and from the packages that are in place."""

    def __init__(self, expected: int) -> None:
        self.expected, self.found, self.unpacked = max(expected, 1), 0, 0  # packages
        self.started = time.perf_counter()
        self.folder = Path(sysconfig.get_paths()["purelib"])
        self.there = self._installed()

    def _installed(self) -> int:
        return len(list(self.folder.glob("*.dist-info")))

    def read(self, line: str) -> None:
        self.found += line.startswith(("Collecting ", "Processing "))
        if line.startswith("Installing collected packages"):
            self.unpacked = line.count(",") + 1

    def share(self) -> float:
        if not self.unpacked:
            return FOUND_SHARE * min(self.found / self.expected, 1.0)
        done = (self._installed() - self.there) / self.unpacked
        return FOUND_SHARE + (1 - FOUND_SHARE) * min(done, 1.0)

    def text(self) -> str:
        spent, share = time.perf_counter() - self.started, self.share()
        left = f", about {spent * (1 - share) / share:.0f} s left" if share > 0.05 else ""
        return f"Installing packages: {share:.0%}, {spent:.0f} s{left}"


def show(progress: Progress, ended: threading.Event) -> None:
    """Rewrite one line each half second on a terminal; else print a line now and then."""
    terminal = sys.stdout.isatty()
    while not ended.wait(0.5 if terminal else SILENT_SECONDS):
        print(
            f"\r{progress.text():<70}" if terminal else progress.text(),
            end="" if terminal else "\n",
            flush=True,
        )
    if terminal:
        print("\r" + " " * 70 + "\r", end="")


def main() -> int:
    pins = [line for line in Path("constraints.txt").read_text().splitlines() if re.match(r"[\w-]+==", line)]
    expected = len(pins) if "dev" in sys.argv[1] else len(pins) // 2  # the pins are those of the extra "dev"
    progress, ended, output = Progress(expected), threading.Event(), []
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--constraint",
        "constraints.txt",
        "--progress-bar",
        "off",
    ]
    print("Installing packages with pip ...", flush=True)
    watcher = threading.Thread(target=show, args=(progress, ended), daemon=True)
    watcher.start()
    process = subprocess.Popen(
        [*command, "--editable", *sys.argv[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        progress.read(line.lstrip())
    status = process.wait()
    ended.set()
    watcher.join()
    print(
        "".join(output) if status else f"Installed in {time.perf_counter() - progress.started:.0f} s.",
        flush=True,
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
