"""One interleaved run: after each step of the real trainer, the hand-written loops take the same batch."""

from __future__ import annotations

import gc
import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from benchmarks.data import Corpus, Row
from benchmarks.variants import VARIANTS, Loop, Recipe
from datasets import Dataset, disable_progress_bars
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from trl import SFTConfig, SFTTrainer

OURS = "ours"
MakeLoop = Callable[[PreTrainedModel, Recipe], Loop]
FIRST_LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass
class Measured:
    """Per variant: seconds per step of every turn after the warm-up, the first loss, on a GPU peak growth in bytes."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    first_loss: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, list[int]] = field(default_factory=dict)
    batches: list[list[Row]] = field(default_factory=list)

    @property
    def real_tokens(self) -> int:
        return sum(len(row["input_ids"]) for rows in self.batches for row in rows)

    def ratio(self, over: str) -> float:
        """Our seconds over another variant's, turn by turn, in the median."""
        pairs = zip(self.seconds[OURS], self.seconds[over], strict=True)
        return median(ours / other for ours, other in pairs)

    def total_ratio(self, over: str) -> float:
        """Our seconds over another variant's, summed over all turns, logging included."""
        return sum(self.seconds[OURS]) / sum(self.seconds[over])

    def memory_ratio(self, over: str) -> float:
        return max(self.peak_bytes[OURS]) / max(self.peak_bytes[over])


def run_interleaved(
    model: PreTrainedModel,
    corpus: Corpus,
    recipe: Recipe,
    *,
    warmup: int,
    turn: int = 1,
    loops: Mapping[str, MakeLoop] = VARIANTS,
    make: Callable[..., Any] | None = None,
) -> Measured:
    """`recipe.steps` optimiser steps of a trainer's `train()`, the `loops` taking the same ones in turn.

    `make` makes the trainer as `make_trainer` does, which is the default.

    All start from the weights of `model` and see the same batches in the same order, `turn` of them at a time
    (`warmup` and the number of steps are multiples of it). CPU seconds of the process on a CPU; wall-clock seconds on
    a GPU, which is waited for between turns only.

    Raises: ValueError where the losses of the first step differ, because different work would be compared.
    """
    others = {name: make_loop(model, recipe) for name, make_loop in loops.items()}
    seen: deque[list[Row]] = deque()
    trainer = (make or make_trainer)(model, corpus, recipe)
    trainer.data_collator = _Recording(trainer.data_collator, seen)
    found = Measured({name: [] for name in (OURS, *others)}, peak_bytes={name: [] for name in (OURS, *others)})
    trainer.add_callback(_TakeTurns(others, seen, found, warmup=warmup, turn=turn, on_gpu=recipe.device == "cuda"))
    found.first_loss[OURS] = float("nan")
    _keep_first_loss(trainer, found.first_loss)
    trainer.train()
    _check_first_losses(found.first_loss, torch.bfloat16 if _is_half(model, recipe) else torch.float32)
    return found


def make_trainer(
    model: PreTrainedModel,
    corpus: Corpus,
    recipe: Recipe,
    *,
    sequential: bool = False,
) -> SFTTrainer:
    """The real trainer with the settings of the recipe; `sequential` takes the rows in their order, not a random one."""
    args = SFTConfig(**trainer_settings(recipe, sequential=sequential))
    rows = Dataset.from_list(corpus.rows)
    trainer = SFTTrainer(model, args=args, train_dataset=rows, processing_class=corpus.tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def trainer_settings(recipe: Recipe, *, sequential: bool) -> dict[str, Any]:
    """What the config of any trainer is given: the recipe, no checkpoint, and nothing that costs time on the side."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl-benchmark-"),
        "max_steps": recipe.steps,
        "per_device_train_batch_size": recipe.batch_size,
        "learning_rate": recipe.learning_rate,
        "max_grad_norm": recipe.max_grad_norm,
        "optim": "adamw_torch_fused",
        "logging_steps": 10,
        "max_length": None,  # the rows are cut already
        "gradient_checkpointing": False,
        "bf16": recipe.autocast,
        "use_cpu": recipe.device == "cpu",
        "train_sampling_strategy": "sequential" if sequential else "random",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


@dataclass
class _Recording:
    """A collator that remembers the rows it was given, so that the other variants get them too."""

    collate: Callable[[list[Any]], dict[str, Any]]
    seen: deque[list[Row]]

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        self.seen.append(rows)
        return self.collate(rows)


class _TakeTurns(TrainerCallback):
    """Times the trainer from the end of one turn in here to the beginning of the next."""

    def __init__(
        self,
        others: Mapping[str, Loop],
        seen: deque[list[Row]],
        found: Measured,
        *,
        warmup: int,
        turn: int,
        on_gpu: bool,
    ) -> None:
        self.others, self.seen, self.found = others, seen, found
        self.warmup, self.turn, self.on_gpu = warmup, turn, on_gpu
        self._started = 0.0
        self._level = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.turn:
            return
        counts = state.global_step > self.warmup
        self._stop(OURS, counts)
        batches = [self.seen.popleft() for _ in range(self.turn)]
        if counts:
            self.found.batches += batches
        is_odd = state.global_step // self.turn % 2
        for name in self.others if is_odd else reversed(self.others):
            self._start()
            losses = [self.others[name].step(rows) for rows in batches]
            self._stop(name, counts)
            self.found.first_loss.setdefault(name, losses[0].item())
        self._start()

    def _start(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._level = torch.cuda.memory_allocated()
        self._started = self._now()

    def _stop(self, name: str, counts: bool) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = (self._now() - self._started) / self.turn
        if not counts:
            return
        self.found.seconds[name].append(seconds)
        if self.on_gpu:
            self.found.peak_bytes[name].append(torch.cuda.max_memory_allocated() - self._level)

    def _now(self) -> float:
        return time.perf_counter() if self.on_gpu else time.process_time()


def _keep_first_loss(trainer: Any, losses: dict[str, float]) -> None:
    """Write the trainer's first loss into `losses`, then get out of its way."""
    training_step = trainer.training_step

    def first_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = training_step(*args, **kwargs)
        losses[OURS] = loss.item()
        del trainer.training_step
        return loss

    trainer.training_step = first_step


def _check_first_losses(losses: Mapping[str, float], dtype: torch.dtype) -> None:
    allowed = FIRST_LOSS_TOLERANCE[dtype]
    if not max(losses.values()) - min(losses.values()) <= allowed:
        raise ValueError(
            f"the variants' losses of the first step must agree to {allowed}, got {dict(losses)}. "
            "They do not do the same work: times would mean nothing."
        )


def _is_half(model: PreTrainedModel, recipe: Recipe) -> bool:
    return recipe.autocast or model.dtype == torch.bfloat16


def on_one_quiet_thread() -> None:
    """One thread for this process, errors alone from the library, and no progress bars."""
    logging.getLogger("trl").setLevel(logging.ERROR)
    disable_progress_bars()
    torch.set_num_threads(1)


def free_memory() -> None:
    """Let go of models of an earlier case."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
