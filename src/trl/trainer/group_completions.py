"""Completions with their rewards, as a table in the terminal, for trackers and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate.utils import gather_object
from torch import Tensor

from trl.reporting.tables import print_prompt_completions_sample
from trl.reporting.trackers import log_table
from trl.rewards.result import source_table
from trl.rollouts.experience import Experience
from trl.trainer.callbacks.sampling import tensorboard_writer

TABLE, FOLDER = "completions", "completions"


class ShownCompletions:
    """The newest batch of completions, of all processes, until it is shown."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._names: tuple[str, ...] = ()

    def gather(
        self,
        experience: Experience,
        texts: Sequence[tuple[Any, Any]],
        names: Sequence[str],
        *,
        advantages: Tensor,
    ) -> None:
        """Bring the rows of all processes together, with scores and advantages; all must call it."""
        scores = [column.tolist() for column in source_table(experience.per_row, names)]
        rows = [
            {"prompt": prompt, "completion": completion, "scores": list(own), "advantage": advantage}
            for (prompt, completion), own, advantage in zip(
                texts,
                zip(*scores, strict=True),
                advantages.tolist(),
                strict=True,
            )
        ]
        self._rows, self._names = gather_object(rows), tuple(names)

    def show(self, trainer: Any) -> None:
        """Print, send and write what was not shown yet; the main process does it."""
        rows, self._rows = self._rows, []
        if not rows or not trainer.is_world_process_zero():
            return
        args, step = trainer.args, trainer.state.global_step
        scores = {
            name: [None if (value := row["scores"][number]) != value else value for row in rows]
            for number, name in enumerate(self._names)
        }
        print_prompt_completions_sample(
            [row["prompt"] for row in rows],
            [row["completion"] for row in rows],
            scores,  # pyright: ignore[reportArgumentType]  (None where a source has no opinion)
            [row["advantage"] for row in rows],
            step,
            args.num_completions_to_print,
        )
        table = pd.DataFrame(
            {
                "step": [step] * len(rows),
                "prompt": [str(row["prompt"]) for row in rows],
                "completion": [str(row["completion"]) for row in rows],
                **scores,
                "advantage": [row["advantage"] for row in rows],
            }
        )
        folder = Path(args.output_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        table.to_parquet(folder / f"completions_{step:05d}.parquet")
        if args.log_unique_prompts:
            table = table.drop_duplicates(subset=["prompt"])
        log_table(TABLE, table, args.report_to, step=step, tensorboard_writer=tensorboard_writer(trainer))
