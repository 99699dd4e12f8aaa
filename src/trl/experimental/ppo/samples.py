"""Responses of the policy to evaluation prompts, as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl.data.rendering import text_tokenizer
from trl.models.switches import undisturbed
from trl.reporting.tables import print_rich_table
from trl.reporting.trackers import log_table
from trl.rollouts.maker import Completed
from trl.trainer.callbacks.sampling import tensorboard_writer

TABLE = "completions"
PRINTED_ROWS = 5


class ShowSamples(TrainerCallback):
    """Shows responses `num_sample_generations` times over a run, evenly, at the end of a batch of rollouts."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After the last optimiser step of every so many batches."""
        trainer = self.trainer
        window, rest = divmod(state.global_step, trainer.sizes.steps)
        every = max(1, trainer.args.num_total_batches // trainer.args.num_sample_generations)
        if rest == 0 and (window - 1) % every == 0:
            trainer.generate_completions(sampling=True)


def completions_table(trainer: Any, *, first_batch_only: bool) -> pd.DataFrame | None:
    """The table on the main process, None on others; a model's modes and random streams are left as they were."""
    found: list[tuple[int, str, str, float]] = []
    tokenizer = text_tokenizer(trainer.processing_class)
    loader = trainer.get_eval_dataloader(_one_set(trainer.eval_dataset))
    with undisturbed(trainer.model_wrapped):
        for rows in loader:
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            numbers = columns.pop("row")
            rollouts, greedy = trainer.rollouts, replace(trainer.sampling, temperature=0.0)
            rollouts.follow(trainer.model_wrapped, trainer.state)
            experience = rollouts.complete(columns["input_ids"], streams=numbers, sampling=greedy)
            inputs = rollouts.inputs(Completed(experience), columns)
            scores = trainer.rewards.score(inputs).rewards.tolist()
            queries = tokenizer.batch_decode(columns["input_ids"], skip_special_tokens=True)
            responses = tokenizer.batch_decode([row.tolist() for row in experience.completions.split()])
            found += zip(numbers, queries, responses, scores, strict=True)
            if first_batch_only:
                break
    if trainer.accelerator.num_processes > 1:
        found = gather_object(found)
    if not trainer.is_world_process_zero():
        return None
    return _shown(trainer, found)


def _shown(trainer: Any, found: list[tuple[int, str, str, float]]) -> pd.DataFrame:
    rows = sorted(
        {row[0]: row[1:] for row in found}.items()
    )  # accelerate repeats rows to fill the last batch
    table = pd.DataFrame([row for _, row in rows], columns=["query", "model response", "score"])
    print_rich_table(table.iloc[:PRINTED_ROWS])
    log_table(
        TABLE,
        table,
        trainer.args.report_to,
        step=trainer.state.global_step,
        tensorboard_writer=tensorboard_writer(trainer),
    )
    return table


def _one_set(dataset: Any) -> Any:
    """The evaluation set, the first of several."""
    return next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
