"""Tables of completions: of evaluation prompts (`generate_during_eval`) and of rollouts (`log_completions`)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from trl.collators.images import DataCollatorForVisionPreference
from trl.data.rendering import text_tokenizer
from trl.models.packed.layout import IGNORED, ROW_KEYS
from trl.reporting.tables import print_prompt_completions_sample, print_rich_table
from trl.reporting.trackers import log_table
from trl.rewards.result import source_table
from trl.rollouts.experience import Experience
from trl.trainer.callbacks.sampling import (
    Inputs,
    generation_settings,
    prompt_ids,
    sample_completions,
    tensorboard_writer,
)

TABLE = "game_log"


def log_evaluation_samples(trainer: Any, dataset: Any, *, prefix: str = "eval") -> pd.DataFrame | None:
    """Complete a random batch of an evaluation set's prompts, and send the table to the trackers and the terminal.

    Columns: `Prompt`, `Policy` and, with a reference model, `Ref Model`. Prompts and samples depend on seed,
    set and optimiser step alone, and training's random streams are left as they were. The table is called `game_log`, with
    the set's prefix in front where that is not `eval`. All processes must call it; the main one is given the table.
    """
    step = trainer.state.global_step
    rows = _some_rows(dataset, trainer.args.per_device_eval_batch_size, key=(trainer.args.seed, prefix, step))
    if not rows:
        return None
    table = _table(trainer, rows, seed=trainer.args.seed + step)
    if not trainer.is_world_process_zero():
        return None
    show_table(trainer, TABLE if prefix == "eval" else f"{prefix}_{TABLE}", table)
    return table


def show_table(trainer: Any, name: str, table: pd.DataFrame, *, printed: int | None = None) -> None:
    """Print a table, or its first `printed` rows, and send it to the trackers."""
    print_rich_table(table.iloc[:printed])
    writer = tensorboard_writer(trainer)
    log_table(name, table, trainer.args.report_to, step=trainer.state.global_step, tensorboard_writer=writer)


def _some_rows(dataset: Any, count: int, *, key: tuple) -> list[dict[str, Any]]:
    """Random rows of a stored set; a stream cannot be looked into and gives its first ones."""
    if not isinstance(dataset, Dataset):
        return list(islice(iter(getattr(dataset, "dataset", dataset)), count))
    draw = random.Random(repr(key))
    return [dataset[index] for index in draw.sample(range(len(dataset)), min(count, len(dataset)))]


def _table(trainer: Any, rows: Sequence[dict[str, Any]], *, seed: int) -> pd.DataFrame:
    tokenizer = text_tokenizer(trainer.processing_class)
    inputs = [_inputs(trainer, row, tokenizer) for row in rows]
    settings = generation_settings(trainer, longest_prompt=max(row["input_ids"].shape[1] for row in inputs))

    def samples(reference: Any = None) -> list[Any]:
        return sample_completions(
            trainer,
            inputs,
            None,
            reference=reference,
            inputs_of=lambda given: given,
            generation_kwargs=settings,
            seed=seed,
        )

    policy = samples()
    columns = {
        "Prompt": [sample.prompt for sample in policy],
        "Policy": [sample.completion for sample in policy],
    }
    reference = trainer.reference
    if hasattr(reference, "active"):
        columns["Ref Model"] = [sample.completion for sample in samples(reference)]
    return pd.DataFrame(columns)


def _inputs(trainer: Any, row: dict[str, Any], tokenizer: Any) -> Inputs:
    collator = trainer.data_collator
    if isinstance(collator, DataCollatorForVisionPreference):
        return illustrated_prompt(collator([row]))
    return {"input_ids": torch.tensor([prompt_ids(row, tokenizer)])}


def illustrated_prompt(batch: Mapping[str, Any]) -> Inputs:
    """The prompt of a batch of one pair with images: its two sequences have the same one, and the same images."""
    end = int((batch["labels"][0] != IGNORED).nonzero()[0])
    shape = batch["input_ids"].shape
    found = {}
    for name, value in batch.items():
        if name == "labels" or name in ROW_KEYS:
            continue
        own = value[: len(value) // 2]
        found[name] = own[:, :end] if value.shape[:2] == shape else own
    return found


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
        """Gather the rows of all processes, with scores and advantages; all must call it."""
        scores = [column.tolist() for column in source_table(experience.per_row, names)]
        rows = [
            {
                "prompt": prompt,
                "completion": completion,
                **dict(zip(names, own, strict=True)),
                "advantage": advantage,
            }
            for (prompt, completion), own, advantage in zip(
                texts, zip(*scores, strict=True), advantages.tolist(), strict=True
            )
        ]
        self._rows, self._names = gather_object(rows), tuple(names)

    def show(self, trainer: Any) -> None:
        """Print, send and write what was not shown yet; the main process does it."""
        rows, self._rows = self._rows, []
        if not rows or not trainer.is_world_process_zero():
            return
        args, step = trainer.args, trainer.state.global_step
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        for name in self._names:  # None where a source has no score
            columns[name] = [None if value != value else value for value in columns[name]]
        texts, shown = (columns["prompt"], columns["completion"]), args.num_completions_to_print
        scores = {name: columns[name] for name in self._names}
        print_prompt_completions_sample(*texts, scores, columns["advantage"], step, shown)
        columns |= {name: [str(text) for text in columns[name]] for name in ("prompt", "completion")}
        table = pd.DataFrame({"step": [step] * len(rows), **columns})
        folder = Path(args.output_dir) / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        table.to_parquet(folder / f"completions_{step:05d}.parquet")
        if args.log_unique_prompts:
            table = table.drop_duplicates(subset=["prompt"])
        log_table(
            "completions", table, args.report_to, step=step, tensorboard_writer=tensorboard_writer(trainer)
        )
