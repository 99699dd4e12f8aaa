"""The completions of rollouts that are kept: files for `trl report`, and the tables of `log_completions`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.reporting.run_checks import text_signs
from trl.reporting.run_events import shortened
from trl.reporting.tables import print_prompt_completions_sample
from trl.reporting.trackers import send_traces
from trl.rewards.result import scores_by_source
from trl.rollouts.experience import ADVANTAGE, OLD, PLACE, REWARD, SAMPLING_LOGPS, SCORES, TOOL_OUTPUT, Experience
from trl.tensors.ragged import Ragged
from trl.trainer.samples import send_table

KEPT_ROWS = 32  # of a step, in whole groups where these are not larger
KEPT_CHARACTERS = 20_000  # of a text
KEPT_TOKENS = 4_096  # of a completion
COUNTED_ROWS = 256  # whose rewards and lengths are kept

Text = str | Sequence[Mapping[str, Any]]  # or messages
Columns = dict[str, list[Any]]


class Newest(NamedTuple):
    """A batch of completions with their prompts and the names of the sources of their rewards."""

    experience: Experience
    texts: Sequence[tuple[Any, Any]]
    names: tuple[str, ...]


class KeptCompletions:
    """The newest batch of completions, until it is logged."""

    def __init__(self) -> None:
        self._newest: Newest | None = None
        self._shown: tuple[Columns, tuple[str, ...]] | None = None
        self._pieces: dict[int, str] = {}
        self._entropies: dict[int, Tensor] = {}

    def keep(self, experience: Experience, texts: Sequence[tuple[Any, Any]], names: Sequence[str]) -> None:
        """Keep a new batch of this process in place of the last one."""
        self._newest, self._entropies = Newest(experience, texts, tuple(names)), {}

    def keep_entropies(self, rows: Experience, entropies: Tensor) -> None:
        """Keep entropies `(K,)` of the tokens of some rows of the batch."""
        if self._newest is not None and PLACE in rows.per_row:
            parts = Ragged(entropies.cpu(), rows.completions.lengths.cpu()).split()
            self._entropies.update(zip(rows.per_row[PLACE].tolist(), parts, strict=True))

    def write(self, trainer: Any, *, shows: bool) -> None:
        """Write the batch if it is new: rows of the main process, or (`shows`) of all processes, which all call it."""
        newest, self._newest = self._newest, None
        events, step, group = trainer.run_report.events, trainer.state.global_step, trainer.sizes.group
        if newest is None or not (shows or events.is_active):
            return
        bound = len(newest.texts) if shows else max(KEPT_ROWS // group * group, min(group, 2 * KEPT_ROWS))
        if shows or step >= events.next_part:
            first = trainer.accelerator.process_index * len(newest.experience)
            columns = self.columns(newest, bound, trainer.rollouts.tokenizer)
            rows, learned = range(first, first + len(columns["prompt"])), len(newest.experience) * trainer.args.sp_size
            columns["group"] = [row // group for row in rows]
            if self._entropies:
                entropies = [self._entropies.get(row % learned, torch.empty(0)) for row in rows]
                columns["token_entropies"] = [row[:KEPT_TOKENS].tolist() for row in entropies]
            if shows:
                parts = gather_object([columns])
                columns = {name: [value for part in parts for value in part[name]] for name in columns}
                self._shown = columns, newest.names
            if trainer.is_world_process_zero():
                events.write_part(Path(trainer.args.output_dir), step, file_columns(columns, step, cut=not shows))
        if events.is_active:
            events.write("rollouts", step, **batch_facts(newest, bound))

    def show(self, trainer: Any) -> None:
        """Print and send what was written for it and not shown yet; the main process does it."""
        shown, self._shown = self._shown, None
        if shown is None or not trainer.is_world_process_zero():
            return
        columns, names = shown
        args, step = trainer.args, trainer.state.global_step
        scores = {name: columns[name] for name in names}
        texts = columns["prompt"], columns["completion"]
        print_prompt_completions_sample(*texts, scores, columns["advantage"], step, args.num_completions_to_print)
        told = {name: columns[name] for name in (*names, "advantage")}
        plain = {name: [as_text(text) for text in columns[name]] for name in ("prompt", "completion")}
        table = pd.DataFrame({"step": [step] * len(texts[0]), **plain, **told})
        if args.log_unique_prompts:
            table = table.drop_duplicates(subset=["prompt"])
        send_table(trainer, "completions", table)
        numbers = [dict(zip(told, row, strict=True)) for row in zip(*told.values(), strict=True)]
        send_traces("traces", *texts, numbers, args.report_to, step=step)

    def columns(self, newest: Newest, bound: int, tokenizer: PreTrainedTokenizerBase) -> Columns:
        """The columns of the first rows."""
        rows = newest.experience.take(torch.arange(min(bound, len(newest.texts))))
        count, texts = len(rows), newest.texts[:bound]
        columns: Columns = {"prompt": [prompt for prompt, _ in texts], "completion": [text for _, text in texts]}
        for name, scores in scores_by_source(rows.per_row, newest.names).items():
            columns[name] = _known(scores)  # None where a source has no score
        columns["advantage"] = _known(rows.per_row[ADVANTAGE]) if ADVANTAGE in rows.per_row else [None] * count
        columns["reward"] = _known(_rewards(rows))
        ids = [tokens[:KEPT_TOKENS].tolist() for tokens in rows.completions.split()]
        for token in {token for row in ids for token in row} - self._pieces.keys():
            self._pieces[token] = str(tokenizer.decode([token]))
        columns["token_texts"] = [[self._pieces[token] for token in row] for row in ids]
        name = OLD if OLD in rows.per_token else SAMPLING_LOGPS
        if name in rows.per_token:
            columns["token_logps"] = [row[:KEPT_TOKENS].float().tolist() for row in rows.ragged(name).split()]
        if TOOL_OUTPUT in rows.per_token:
            columns["token_tool"] = [row[:KEPT_TOKENS].bool().tolist() for row in rows.ragged(TOOL_OUTPUT).split()]
        return columns


def as_text(text: Text) -> str:
    """A text; messages as JSON."""
    return text if isinstance(text, str) else json.dumps(text, default=str, ensure_ascii=False)


def file_columns(columns: Columns, step: int, *, cut: bool) -> Columns:
    """The columns of a file: messages as JSON, long texts `cut`."""
    written: Columns = {"step": [step] * len(columns["prompt"]), **columns}
    for name in ("prompt", "completion"):
        written[f"chat_{name}"] = [not isinstance(text, str) for text in columns[name]]
        written[name] = [as_text(shortened(text, KEPT_CHARACTERS) if cut else text) for text in columns[name]]
    return written


def batch_facts(newest: Newest, bound: int) -> dict[str, object]:
    """Rewards and lengths of completions, and signs in their texts."""
    experience = newest.experience
    rewards, lengths = _known(_rewards(experience)[:COUNTED_ROWS]), experience.completions.lengths[:COUNTED_ROWS]
    texts = [(as_text(prompt), _said(completion)) for prompt, completion in newest.texts[:bound]]
    rounded = [None if value is None else float(f"{value:.4g}") for value in rewards]
    return {"of": len(experience), "rewards": rounded, "lengths": lengths.tolist(), **text_signs(texts)}


def _said(text: Text) -> str:
    if isinstance(text, str):
        return text
    return "\n".join(str(message.get("content") or "") for message in text if message.get("role") == "assistant")


def _rewards(rows: Experience) -> Tensor:
    """What the method makes of the rewards, else their sum; NaN without any."""
    columns = rows.per_row
    return columns.get(REWARD, columns.get(SCORES, torch.full([len(rows)], torch.nan)))


def _known(column: Tensor) -> list[float | None]:
    return [None if value != value else value for value in column.tolist()]
