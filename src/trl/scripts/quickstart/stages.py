"""What a stage of the pipeline is, what the stages share, and the first one.

A stage takes the model that the context holds, leaves its own in it, and answers with one row of the final table. Another
stage is another object with these members: a row of `STAGES` in `pipeline.py`, and its name in a row of `METHODS`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trl.scripts.quickstart.evaluation import exact_match, kl_divergence, mean_reward
from trl.scripts.quickstart.model import build_model, build_tokenizer, count_parameters
from trl.scripts.quickstart.pairs import make_pairs
from trl.scripts.quickstart.plot import Panel
from trl.scripts.quickstart.report import Report
from trl.scripts.quickstart.task import Task

EVAL_BATCH_SIZE = 300
Curve = list[tuple[int, float]]  # (optimiser step, value)


@dataclass(frozen=True)
class StageResult:
    """One row of the final table: what a stage reached on the held-out problems, and what it took.

    Shares lie between 0 and 1, `kl` is in nats per answer; None is what the stage has not.
    """

    stage: str
    exact_match: float | None = None
    pair_accuracy: float | None = None
    reward: float | None = None
    kl: float | None = None
    loss: float | None = None
    seconds: float = 0.0
    steps: int | None = None
    model_dir: str | None = None


@dataclass
class Context:
    """What the stages share; `model` and `tokenizer` are those of the latest stage that made a policy."""

    output_dir: Path
    seed: int
    max_steps: int | None
    task: Task
    report: Report
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    reward_model: PreTrainedModel | None = None
    results: list[StageResult] = field(default_factory=list)
    replies: dict[str, list[str]] = field(default_factory=dict)
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)

    def evaluate(self, stage: str) -> float:
        """Exact match of the present model on the held-out problems, from 0 to 1; its replies are kept."""
        accuracy, self.replies[stage] = exact_match(
            self.policy, self.ready_tokenizer, self.task.held_out, EVAL_BATCH_SIZE, task=self.task
        )
        return accuracy

    def kl_from(self, stage: str) -> float:
        """The distance of the present model from that of an earlier stage, in nats per answer to a held-out problem."""
        reference = AutoModelForCausalLM.from_pretrained(self.folder(stage))
        task, tokenizer = self.task, self.ready_tokenizer
        return kl_divergence(self.policy, reference, tokenizer, task.held_out, task=task, seed=self.seed)

    def reward_of(self, stage: str) -> float | None:
        """The reward model's mean score of a stage's replies, None where there is one of both only."""
        if self.reward_model is None or stage not in self.replies:
            return None
        task, replies = self.task, self.replies[stage]
        return mean_reward(self.reward_model, self.ready_tokenizer, task.held_out, replies, task=task)

    def folder(self, stage: str) -> Path:
        """Where a stage writes."""
        return self.output_dir / stage

    @property
    def policy(self) -> PreTrainedModel:
        """The model that answers."""
        assert self.model is not None, "the first stage builds it"
        return self.model

    @property
    def ready_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of every model here."""
        assert self.tokenizer is not None, "the first stage builds it"
        return self.tokenizer

    def load_policy(self, stage: str) -> None:
        """Take up what a stage has saved."""
        self.model = AutoModelForCausalLM.from_pretrained(self.folder(stage))
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder(stage))

    def load_reward_model(self, stage: str) -> None:
        """Take up the reward model that a stage has saved."""
        self.reward_model = AutoModelForSequenceClassification.from_pretrained(self.folder(stage))

    def pair_rows(self, name: str) -> list[dict[str, Any]]:
        """The pairs `name` ("pairs" or "held_out_pairs"), as the reward stage wrote them."""
        lines = (self.output_dir / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


class Stage(Protocol):
    """One step of the pipeline."""

    @property
    def name(self) -> str:
        """Names its row, its folder and its replies."""
        ...

    @property
    def panel(self) -> Panel | None:
        """What of its curves is drawn."""
        ...

    def run(self, context: Context) -> StageResult:
        """Work on `context.model`, leave the new model there, and say what was reached."""
        ...

    def restore(self, context: Context) -> None:
        """Leave in the context what `run` left there, from the files of a run that had finished this stage."""
        ...


@dataclass(frozen=True)
class BaseModel:
    """Data files, tokenizer, and a model that has learnt nothing."""

    name: str = "base"
    panel: Panel | None = None

    def run(self, context: Context) -> StageResult:
        """Build everything in memory; the untrained model's accuracy is the floor."""
        started = time.perf_counter()
        task = context.task
        write_rows(context.output_dir / "train.jsonl", task.train_rows())
        write_rows(context.output_dir / "held_out.jsonl", task.rows(task.held_out))
        self.restore(context)
        context.report.built(context.task, len(context.ready_tokenizer), count_parameters(context.policy))
        accuracy = context.evaluate(self.name)
        return StageResult(self.name, exact_match=accuracy, seconds=time.perf_counter() - started)

    def restore(self, context: Context) -> None:
        """Build the tokenizer and the model, which follow from task and seed."""
        contents = (message["content"] for row in context.task.train_rows() for message in row["messages"])
        context.tokenizer = build_tokenizer(contents)
        context.model = build_model(context.tokenizer, seed=context.seed)


def write_pairs(context: Context) -> None:
    """Write pairs of the training problems, and of those held out; the wrong answers are the present model's."""
    task = context.task
    sets = {"pairs": (task.problems, context.seed), "held_out_pairs": (task.held_out, context.seed + 1)}
    for name, (problems, seed) in sets.items():
        rows = make_pairs(context.policy, context.ready_tokenizer, problems, task=task, seed=seed)
        write_rows(context.output_dir / f"{name}.jsonl", rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def as_json(result: StageResult, context: Context) -> Mapping[str, Any]:
    """All that a finished stage leaves besides its model."""
    name = result.stage
    return {
        "result": asdict(result),
        "replies": context.replies.get(name),
        "curves": context.curves.get(name, {}),
    }
