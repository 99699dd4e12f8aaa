"""The pipeline as a sequence of stages.

A stage takes the model that the context holds, leaves its own in it, and answers with one row of the final table. Another
stage is another class with `name` and `run`, appended to `STAGES`; those before it need not know.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.scripts.quickstart.evaluation import exact_match
from trl.scripts.quickstart.model import build_model, build_tokenizer, count_parameters
from trl.scripts.quickstart.report import Report, TrainingProgress
from trl.scripts.quickstart.task import Task
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

EVAL_BATCH_SIZE = 256


@dataclass(frozen=True)
class StageResult:
    """One row of the final table: what a stage reached on the held-out problems, and what it took."""

    stage: str
    exact_match: float
    loss: float | None
    seconds: float
    steps: int = 0
    model_dir: Path | None = None


@dataclass
class Context:
    """What the stages share; `model` and `tokenizer` are those of the latest stage."""

    output_dir: Path
    seed: int
    max_steps: int | None
    task: Task
    report: Report
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    results: list[StageResult] = field(default_factory=list)
    replies: dict[str, list[str]] = field(default_factory=dict)
    losses: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def evaluate(self, stage: str) -> float:
        """Exact match of the present model on the held-out problems, from 0 to 1; its replies are kept."""
        assert self.model is not None and self.tokenizer is not None
        accuracy, self.replies[stage] = exact_match(
            self.model, self.tokenizer, self.task.held_out, EVAL_BATCH_SIZE, task=self.task
        )
        return accuracy


class Stage(Protocol):
    """One step of the pipeline."""

    @property
    def name(self) -> str:
        """Names its row, its folder and its replies."""
        ...

    def run(self, context: Context) -> StageResult:
        """Work on `context.model`, leave the new model there, and say what was reached."""
        ...


@dataclass(frozen=True)
class BaseModel:
    """Data files, tokenizer, and a model that has learnt nothing."""

    name: str = "base"

    def run(self, context: Context) -> StageResult:
        """Build everything in memory; the untrained model's accuracy is the floor."""
        started = time.perf_counter()
        task = context.task
        rows = task.train_rows()
        write_rows(context.output_dir / "train.jsonl", rows)
        write_rows(context.output_dir / "held_out.jsonl", task.rows(task.held_out))
        context.tokenizer = build_tokenizer(message["content"] for row in rows for message in row["messages"])
        context.model = build_model(context.tokenizer, seed=context.seed)
        context.report.built(context.task, len(context.tokenizer), count_parameters(context.model))
        accuracy = context.evaluate(self.name)
        return StageResult(self.name, accuracy, None, time.perf_counter() - started)


@dataclass(frozen=True)
class SupervisedFineTuning:
    """`SFTTrainer` on the conversations, training on the assistant's tokens alone."""

    name: str = "sft"
    steps: int = 1000
    batch_size: int = 64
    learning_rate: float = 3e-3

    def run(self, context: Context) -> StageResult:
        """Fine-tune, save, evaluate."""
        started = time.perf_counter()
        assert context.model is not None
        progress = TrainingProgress(context.report, self.name)
        args = self.config(context)
        trainer = SFTTrainer(
            model=context.model,
            args=args,
            train_dataset=Dataset.from_list(context.task.train_rows()),
            processing_class=context.tokenizer,
            callbacks=[progress],
        )
        progress.replace_printers(trainer)
        trainer.train()
        trainer.save_model()
        context.losses[self.name] = progress.losses
        return StageResult(
            stage=self.name,
            exact_match=context.evaluate(self.name),
            loss=progress.losses[-1][1],
            seconds=time.perf_counter() - started,
            steps=args.max_steps,
            model_dir=context.output_dir / self.name,
        )

    def config(self, context: Context) -> SFTConfig:
        """The whole configuration; the model is far too small for anything to save memory."""
        steps = context.max_steps or self.steps
        return SFTConfig(
            output_dir=str(context.output_dir / self.name),
            assistant_only_loss=True,
            max_steps=steps,
            per_device_train_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(50, steps // 10),
            adam_beta2=0.95,
            weight_decay=0.01,
            gradient_checkpointing=False,
            logging_steps=max(1, min(20, steps // 3)),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=context.seed,
        )


STAGES: tuple[Stage, ...] = (BaseModel(), SupervisedFineTuning())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
