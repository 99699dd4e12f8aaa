"""A plan as tables in the terminal."""

from rich.table import Table

from trl.reporting.tables import open_console
from trl.scripts.planning.plan import Plan


def size_of(number: float) -> str:
    """Bytes in a unit that leaves few digits."""
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if number >= pair[0] / 10), (2**10, "KiB"))
    return f"{number / unit:,.1f} {name}"


def parts_table(plan: Plan) -> Table:
    """The parts of the memory at the peak, and their sum."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, size in plan.parts.items():
        later = name == "gradients" and plan.gradients > 1.01 * size
        table.add_row(name, size_of(size), f"  {size_of(plan.gradients)} after the backward pass" if later else "")
    table.add_row("together", size_of(plan.peak), style="bold")
    return table


def print_plan(plan: Plan) -> None:
    """Print what is planned, the memory of a device, what fits, and the levers."""
    console = open_console(highlight=False, soft_wrap=True)
    sharing, rows = plan.sharding, "row" if plan.rows == 1 else "rows"
    over = f"{sharing.devices} GPUs with {sharing.name}" if sharing.devices > 1 else sharing.name
    tokens = f"{plan.lengths.row:,} tokens"
    console.print(f"{plan.method}, {plan.weights / 1e6:,.0f} million weights, {over}", style="bold")
    console.print(f"Micro-batches of {plan.rows} {rows} of {tokens}; the peak is in the {plan.phase}.\n")
    console.print(parts_table(plan))
    if plan.on_host:
        console.print(f"Beside it {size_of(plan.on_host)} in CPU memory.")
    if plan.memory is not None:
        verdict = "It fits" if plan.fits else "It does not fit"
        console.print(
            f"\n{verdict} in {size_of(plan.memory)}. The largest that fit, each with all else as it is:", style="bold"
        )
        for name, number in (("rows of a micro-batch", plan.largest_batch), ("tokens of a row", plan.largest_length)):
            console.print(f"  {name:<22} {f'{number:,}' if number else 'none'}")
    if plan.levers:
        console.print("\nLevers, each alone", style="bold")
        width = max(len(lever.name) for lever in plan.levers)
        for lever in plan.levers:
            console.print(f"  {lever.name:<{width}} {size_of(lever.frees):>10}  {lever.setting}", markup=False)
    console.print("\nNot counted: the driver's context, NCCL and fragmentation (1 to 2 GiB of a GPU).")
