"""`trl report RUN [RUN2 …]`: what happened in runs, on one page of HTML without network."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from trl.scripts.plain_parser import PlainParser

PAUSE = 10.0  # seconds between two pages of `--watch`


def make_parser() -> PlainParser:
    """The options of `trl report`."""
    parser = PlainParser(
        prog="trl report",
        usage="trl report RUN [RUN2 ...] [--html FILE] [--watch [SECONDS]]",
        description="Show runs on a page that needs no network: settings, curves, completions with their rewards, "
        "signs that something is wrong, time and memory. RUN is the output_dir of a run, also of one that is going on.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output folders of runs")
    parser.add_argument("--html", metavar="FILE", type=Path, help="the page (default: report.html in the first folder)")
    parser.add_argument(
        "--watch", metavar="SECONDS", nargs="?", type=float, const=PAUSE,
        help=f"write the page again every SECONDS (default: {PAUSE:g}) until the runs have ended",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status, 2 for folders without a run."""
    return make_parser().run(report, argv)


def report(options: argparse.Namespace) -> None:
    """Write the page, and with `--watch` again until the runs have ended."""
    page: Path = options.html or options.runs[0] / "report.html"
    if options.watch is not None and options.watch <= 0:
        raise ValueError(f"--watch must be > 0, got {options.watch:g}.")
    if options.html and not page.resolve().parent.is_dir():
        raise ValueError(f"--html {page} is in a folder that does not exist. Make the folder.")
    while not write_page(options.runs, page, refresh=options.watch) and options.watch is not None:
        time.sleep(options.watch)


def write_page(folders: Sequence[Path], page: Path, *, refresh: float | None = None) -> bool:
    """Write the page in one piece and print what was seen; returns whether all runs have ended."""
    from trl.scripts.pages import embedded, render
    from trl.scripts.pages.runs import Run, compared

    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    runs = [Run(folder, name, share=1 / len(folders)) for folder, name in zip(folders, names, strict=True)]
    have_ended = all(run.has_ended for run in runs)
    text = render(
        "run.html", runs=runs, data=embedded([run.data for run in runs]),
        figures=compared([run.figures for run in runs]),
        settings=compared([run.start["settings"] for run in runs], missing="default"),
        refresh=None if have_ended else refresh, written=time.strftime("%Y-%m-%d %H:%M:%S"),
    )  # fmt: skip
    aside = page.with_name(f"{page.name}.new")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, page)
    for run in runs:
        print(f"{run.name} {run.state}: {', '.join(sign.name for sign in run.signs) or 'no sign of a fault'}")
    print(f"Written: {page}")
    return have_ended
