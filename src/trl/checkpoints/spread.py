"""How the rows of an optimiser step are spread over processes, and whether another number of them has the same rows."""

from pathlib import Path
from typing import NamedTuple

from trl.checkpoints.wholeness import CheckpointError
from trl.options.checks import Settings

_NAMES = ("processes", "per_device_train_batch_size", "gradient_accumulation_steps")


class Spread(NamedTuple):
    """A step's rows: the `processes`, `copies` of which share each micro-batch, its rows, and micro-batches of each."""

    processes: int
    copies: int
    rows: int
    micro_batches: int

    @classmethod
    def of(cls, settings: Settings) -> "Spread | None":
        """That of a run's settings; None where they do not name it."""
        if any(name not in settings for name in _NAMES):
            return None
        processes, rows, micro_batches = (int(settings[name]) for name in _NAMES)
        return cls(processes, int(settings.get("sp_size", 1)), rows, micro_batches)

    @property
    def round(self) -> int:
        """Rows of one micro-batch of every process."""
        return self.rows * (self.processes // self.copies)

    @property
    def step(self) -> int:
        """Rows of an optimiser step."""
        return self.round * self.micro_batches

    def __str__(self) -> str:
        sizes = f"per_device_train_batch_size {self.rows} x gradient_accumulation_steps {self.micro_batches}"
        return f"{self.step} ({sizes} x {self.processes // self.copies} processes)"


def compared_settings(recorded: Settings, settings: Settings) -> Settings:
    """The recorded settings that may be named as changed: not the cut of steps that have as many rows as before."""
    before, now = Spread.of(recorded), Spread.of(settings)
    if before is None or now is None or before.step != now.step:
        return recorded
    return {name: value for name, value in recorded.items() if name not in (*_NAMES, "sp_size")}


def check_spread(checkpoint: Path, recorded: Settings, facts: Settings) -> None:
    """Raise CheckpointError where another number of processes than the checkpoint's would train on other rows.

    The rows of step k are those from k * `Spread.step` on, in an order that depends on the seed alone.
    """
    settings, data = facts["settings"], facts["data"]
    before, now = Spread.of(recorded["settings"]), Spread.of(settings)
    if before is None or now is None or before.processes // before.copies == now.processes // now.copies:
        return
    if before.step != now.step:
        raise CheckpointError(
            f"{checkpoint} was trained in steps of {before} rows, and this run has {now}. {_remedy(before, now)}, or "
            "ignore_data_skip=True to begin at the first row."
        )
    if settings.get("dataloader_drop_last") and data and data["rows"] % before.round != data["rows"] % now.round:
        raise CheckpointError(
            f"{checkpoint} was trained with dataloader_drop_last=True in rounds of {before.round} rows, and this run "
            f"has {now.round}: epochs end with other rows. Let per_device_train_batch_size x processes be "
            f"{before.round}."
        )
    if data is None and facts.get("workers", 0) > 1:
        raise CheckpointError(
            f"{checkpoint} is of {before.processes} processes, and the rows of a stream that several workers read "
            f"(dataloader_num_workers={facts['workers']}) depend on their number. Launch as many processes."
        )
    sizes, sizes_now = (part.get("rollouts", {}) for part in (recorded, facts))
    if sizes and sizes_now and sizes != sizes_now:
        parts = ", ".join(f"{name} {size}, now {sizes_now[name]}" for name, size in sizes.items())
        raise CheckpointError(
            f"{checkpoint} learned from other rows of its rollouts ({parts}). Set generation_batch_size as it was, and "
            "let per_device_train_batch_size x gradient_accumulation_steps be a multiple of num_generations."
        )


def _remedy(before: Spread, now: Spread) -> str:
    """Settings, or else numbers of processes, with which a step has as many rows as before."""
    processes = now.processes // now.copies
    if before.step % processes:
        counts = [str(count) for count in range(1, before.step + 1) if before.step % count == 0]
        return f"{processes} processes cannot share {before.step} rows: launch one of {', '.join(counts)}"
    share = before.step // processes
    sizes = [before.rows] if share % before.rows == 0 else [n for n in range(1, now.rows + 1) if share % n == 0]
    return f"Set per_device_train_batch_size={sizes[-1]} and gradient_accumulation_steps={share // sizes[-1]}"
