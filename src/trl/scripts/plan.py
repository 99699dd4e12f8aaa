"""`trl plan METHOD`: the memory of a run before anything but the model's config is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trl.options.spelling import did_you_mean
from trl.reporting.tables import open_console
from trl.scripts.plain_parser import INPUT_ERRORS, PlainParser, unknown_arguments
from trl.scripts.planning import METHODS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trl.scripts.planning.plan import Plan


def make_parser() -> PlainParser:
    """The options of `trl plan` itself."""
    parser = PlainParser(
        prog="trl plan",
        usage="trl plan METHOD --model_name_or_path MODEL [--gpus N] [--memory 80GB] [options of the method]",
        description="Print the memory of a run on each GPU, what fits, and what each lever frees. Takes the options of "
        "`trl METHOD`, --config and --accelerate_config too. Loads the model's config only.",
    )
    parser.add_argument("method", metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--gpus", type=int, default=1, help="processes with a GPU each (default: 1)")
    parser.add_argument("--memory", metavar="SIZE", help="of a GPU, as 80GB or 24GiB: also print what fits")
    parser.add_argument("--no_levers", action="store_true", help="leave the table of levers out: faster")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and print; returns the exit status: 1 for a run that does not fit in `--memory`, 2 for wrong options."""
    from trl.scripts.planning.plan import planned
    from trl.scripts.planning.run import run_for
    from trl.scripts.running import notes_shown

    parser = make_parser()
    options, words = parser.parse_known_args(argv)
    if options.method not in METHODS:  # perhaps the value of a misspelt option
        names = [action.dest for action in parser._actions]
        if misspelt := [word for word in words if did_you_mean(word, names)]:
            parser.error("\n".join(unknown_arguments(misspelt, names)))
    try:
        run = run_for(options.method, words, options.gpus, options.memory)
        with notes_shown():
            made = planned(run, levers=not options.no_levers)
    except INPUT_ERRORS as error:
        return parser.report(error)
    print_plan(made)
    return int(made.fits is False)


def plan(
    config: "str | Path | PretrainedConfig", *, method: str = "sft", gpus: int = 1, memory: str | None = None,
    levers: bool = False, **options: object,
) -> "Plan":  # fmt: skip
    """The memory of a run on each GPU, from its model's config alone.

    `config` is a YAML file of `trl METHOD`, a model's folder or name on the Hub, or a model's config. `memory` is that
    of a GPU (`"80GB"`): the plan then says what fits. `levers` also measures what each lever frees. `options` are those
    of the method's command, and `accelerate_config`. Raises: ValueError for options that do not fit; FileNotFoundError.
    """
    from trl.scripts.planning.plan import planned
    from trl.scripts.planning.run import run_for

    settings, words = {name: list(x) if isinstance(x, tuple) else x for name, x in options.items()}, list[str]()
    if is_named := isinstance(config, (str, Path)):
        words = ["--config" if str(config).endswith((".yaml", ".yml")) else "--model_name_or_path", str(config)]
    return planned(run_for(method, words, gpus, memory, None if is_named else config, settings), levers=levers)


def size_of(number: float) -> str:
    """Bytes in a unit that leaves few digits."""
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if number >= pair[0] / 10), (2**10, "KiB"))
    return f"{number / unit:,.1f} {name}"


def print_plan(plan: "Plan") -> None:
    """Print what is planned, the memory of a device, what fits, and the levers."""
    console = open_console(highlight=False, soft_wrap=True)
    sharing, several = plan.sharding, plan.sharding.devices > 1
    over, on_each = (f"{sharing.devices} GPUs with {sharing.name}", " on each GPU") if several else (sharing.name, "")
    rows = f"{plan.rows} {'row' if plan.rows == 1 else 'rows'} of {plan.lengths.row:,} tokens{on_each}"
    console.print(f"{plan.method}, {plan.weights / 1e6:,.0f} million weights, {over}", style="bold")
    console.print(f"Micro-batches of {rows}; the peak is in the {plan.phase}.\n")
    width = max(map(len, plan.parts))
    for name, size in plan.parts.items():
        is_less = name == "gradients" and plan.gradients > 1.01 * size
        after = f"   {size_of(plan.gradients)} after the backward pass" if is_less else ""
        console.print(f"{name:<{width}} {size_of(size):>11}{after}", markup=False)
    console.print(f"{'together':<{width}} {size_of(plan.peak):>11}", style="bold")
    if plan.memory is not None:
        fits, batch = "fits" if plan.fits else "does not fit", f"rows of a micro-batch{on_each}"
        heading = f"It {fits} in {size_of(plan.memory)}. The largest that fit, each with all else as it is:"
        console.print(f"\n{heading}", style="bold")
        for name, number in ((batch, plan.largest_batch), ("tokens of a row", plan.largest_length)):
            console.print(f"  {name:<{len(batch)}}  {f'{number:,}' if number else 'not even one'}")
    if plan.levers:
        console.print("\nLevers, each alone", style="bold")
        width = max(len(lever.name) for lever in plan.levers)
        for lever in plan.levers:
            console.print(f"  {lever.name:<{width}} {size_of(lever.frees):>10}  {lever.setting}", markup=False)
    console.print("\nNot counted: the driver's context, NCCL and fragmentation (1 to 2 GiB of a GPU).")
