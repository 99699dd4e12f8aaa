"""`trl inspect DATA --model M`: a data set as training would see it, with trained tokens, lengths and faults."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trl.scripts.plain_parser import INPUT_ERRORS, PlainParser

if TYPE_CHECKING:
    from trl.scripts.inspection.collect import Inspection

METHODS = ("sft", "reward", "dpo", "orpo", "cpo", "kto", "bco", "prm", "grpo", "rloo", "online-dpo", "nash-md", "xpo")


def make_parser() -> PlainParser:
    """The options of `trl inspect` itself."""
    parser = PlainParser(
        prog="trl inspect",
        usage="trl inspect DATA --model MODEL [--method METHOD] [--html FILE] [--strict] [options of the method]",
        description="Show a data set as training would see it: the trained tokens of its rows, lengths, and faults. "
        "DATA is a file, a folder or a name on the Hub. Rows are prepared as `trl METHOD` does, whose options (and "
        "--config) are taken too. Loads no weights.",
    )
    parser.add_argument("--model", metavar="MODEL", help="the model whose config and tokenizer are used")
    parser.add_argument("--method", default="sft", choices=METHODS, help="what the rows are for (default: sft)")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a page, which needs no network")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if there is a fault")
    parser.add_argument("--rows", type=int, help="first rows only (default: all; of a stream 10,000)")
    parser.add_argument("--shown", type=int, default=20, help="rows that are shown with their tokens (default: 20)")
    parser.add_argument("--answers", metavar="COLUMN", help="the answers that --reward_funcs are tried on")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect; returns the exit status: 1 for faults with `--strict`, 2 for rows that cannot be prepared."""
    parser = make_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    data, arguments = (arguments[:1], arguments[1:]) if arguments and arguments[0][:1] != "-" else ([], arguments)
    options, rest = parser.parse_known_args(arguments)
    for flag, value in (("--dataset_name", data[0] if data else None), ("--model_name_or_path", options.model)):
        rest += [] if value is None else [flag, value]
    rest += ["--use_cpu", "true"]  # nothing is computed
    try:
        for name in ("rows", "shown"):
            if (number := getattr(options, name)) is not None and number < 1:
                raise ValueError(f"--{name} must be at least 1, got {number}.")
        if options.html is not None and not options.html.resolve().parent.is_dir():
            raise ValueError(f"--html {options.html} is in a folder that does not exist. Make the folder.")
        from trl.scripts.inspection.collect import inspect_data
        from trl.scripts.pages import render
        from trl.scripts.training import method_parser

        parsed = method_parser(options.method, parser.prog).parse_args_and_config(rest)
        inspection = inspect_data(options, parsed)
    except INPUT_ERRORS as error:
        return parser.report(error)
    print_inspection(inspection)
    if options.html is not None:
        page = render("inspection.html", inspection=inspection, zip=zip)
        options.html.write_text(page, encoding="utf-8")
        print(f"Written: {options.html}")
    return int(options.strict and bool(inspection.faults))


def print_inspection(inspection: "Inspection", *, rows: int = 2) -> None:
    """Print the numbers, the first rows and the faults."""
    from trl.reporting.tables import open_console
    from trl.scripts.messages import Shown, print_rows

    console = open_console(highlight=False, soft_wrap=True)
    shown = [(number, [Shown(*sequence[:3]) for sequence in row]) for number, row in inspection.shown[:rows]]
    print_rows(console, inspection.figures, shown, inspection.tokenizer)
    for fault in inspection.faults:
        first = f" (first: {', '.join(map(str, fault.rows))})" if fault.rows else ""
        console.print(f"\n{fault.name}: {fault.count:,} of {fault.of:,} rows{first}", style="bold red", markup=False)
        console.print(f"  {fault.text}", markup=False)
    if not inspection.faults:
        console.print("\nNo fault was found.", style="bold")
