"""The stages of the quickstart, each with a public trainer as a user's program would use it, and its output."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from trl.data.rendering import Json
from trl.reporting.tables import open_console
from trl.scripts.quickstart.task import (
    MAX_ANSWER_TOKENS,
    Row,
    Task,
    build_model,
    build_tokenizer,
    is_right,
    make_pairs,
    make_task,
    replies,
    share_right,
)

SHOWN_ROWS = 8
EXACT_MATCH = "exact_match"
Inputs = Json  # arguments of a trainer
Curves = dict[str, list[tuple[int, float]]]  # metric -> (optimiser step, value)
ENOUGH = 0.5  # share of right answers to training rows at which supervised fine-tuning stops
PROBED = 100  # training rows that this share is taken of


@dataclass
class Run:
    """What the stages share; `model` is the policy of the latest stage, `teacher` and `reward_model` are others."""

    output_dir: Path
    seed: int
    max_steps: int | None
    console: Console
    task: Task
    tokenizer: PreTrainedTokenizerFast
    model: PreTrainedModel
    reward_model: PreTrainedModel | None = None
    teacher: PreTrainedModel | None = None
    pairs: dict[str, Dataset] = field(default_factory=dict)
    curves: dict[str, Curves] = field(default_factory=dict)

    def train(self, name: str) -> dict[str, object]:
        """Train a stage, save its model, and return its steps and its accuracy on held-out pairs."""
        stage = STAGES[name]
        steps = self.max_steps or stage.steps
        package = import_module(stage.package)
        trainer_class, config = (getattr(package, f"{stage.prefix}{kind}") for kind in ("Trainer", "Config"))
        args = config(
            output_dir=str(self.output_dir / name), max_steps=steps, warmup_steps=min(20, steps // 10),
            adam_beta2=0.95, weight_decay=0.01, gradient_checkpointing=False, logging_steps=min(10, steps),
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=self.seed, **stage.settings,
        )  # fmt: skip
        probe = Probe(self.tokenizer, [] if name == "reward" else self.task.held_out)
        inputs = {"model": self.model, "processing_class": self.tokenizer, **stage.inputs(self)}
        trainer = trainer_class(args=args, callbacks=[probe, *inputs.pop("callbacks", [])], **inputs)
        trainer.train()
        trainer.save_model()
        self.curves[name] = probe.curves
        accuracy = trainer.evaluate()[stage.accuracy] if stage.accuracy else None
        return {"steps": trainer.state.global_step, "pair_accuracy": accuracy}

    def prompts(self) -> Dataset:
        return Dataset.from_list(self.task.train).select_columns("prompt")

    def rows(self, name: str, rows: list[Row]) -> Dataset:
        """The rows as a data set, written to `<name>.jsonl` as well."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self.output_dir / f"{name}.jsonl").write_text(text, encoding="utf-8")
        return Dataset.from_list(rows)


class StopsEarly(TrainerCallback):
    """Stops once the model answers enough training rows, so that the later stages have something left to teach."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step % 5 == 0:
            rows = self.run.task.train[:PROBED]
            share = share_right(replies(self.run.model, self.run.tokenizer, rows), rows)
            control.should_training_stop |= share >= ENOUGH


class Probe(TrainerCallback):
    """Adds exact match on `held_out`, if it has rows, to each log of training; `curves` has every logged number."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, held_out: Sequence[Row]) -> None:
        self.tokenizer, self.held_out, self.curves = tokenizer, held_out, Curves()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if any(name.endswith("runtime") for name in logs):
            return
        if self.held_out:
            logs[EXACT_MATCH] = share_right(replies(kwargs["model"], self.tokenizer, self.held_out), self.held_out)
        for name, value in logs.items():
            self.curves.setdefault(name, []).append((state.global_step, float(value)))


def reward_inputs(run: Run) -> Inputs:
    """Pairs, and the fine-tuned model with one more layer and a score on top."""
    for split, rows, seed in (("train", run.task.train, 0), ("eval", run.task.held_out, 1)):
        pairs = make_pairs(run.model, run.tokenizer, rows, seed=run.seed + seed)
        run.pairs[f"{split}_dataset"] = run.rows(f"{split}_pairs", pairs)
    torch.manual_seed(run.seed)
    options = {"num_labels": 1, "num_hidden_layers": 3}
    run.reward_model = AutoModelForSequenceClassification.from_pretrained(run.output_dir / "sft", **options)
    return {"model": run.reward_model, **run.pairs}


def teacher_inputs(run: Run) -> Inputs:
    """A model with twice the layers, and right answers."""
    run.teacher = build_model(run.tokenizer, seed=run.seed, layers=4)
    return {"model": run.teacher, "train_dataset": Dataset.from_list(run.task.train)}


def group_inputs(run: Run) -> Inputs:
    """Prompts, rewarded for right answers."""
    prompts = [{"prompt": row["prompt"], "answer": row["completion"]} for row in run.task.train]
    return {"reward_funcs": is_right, "train_dataset": run.rows("prompts", prompts)}


class Stage(NamedTuple):
    """A stage: its trainer and config, their arguments, and the metric of held-out pairs (`accuracy`)."""

    prefix: str
    steps: int
    inputs: Callable[[Run], Inputs]
    settings: Json
    accuracy: str = ""
    package: str = "trl"


_GROUPS = {
    "per_device_train_batch_size": 128, "steps_per_generation": 2, "num_generations": 8, "learning_rate": 1e-3,
    "max_completion_length": MAX_ANSWER_TOKENS, "lr_scheduler_type": "linear",
}  # fmt: skip
STAGES = {
    "sft": Stage(
        "SFT", 200,
        lambda run: {"train_dataset": run.rows("train", run.task.train), "callbacks": [StopsEarly(run)]},
        {"per_device_train_batch_size": 64, "learning_rate": 1e-3, "lr_scheduler_type": "constant_with_warmup"},
    ),
    "reward": Stage(
        "Reward", 150, reward_inputs,
        {
            "per_device_train_batch_size": 128, "learning_rate": 2e-3, "lr_scheduler_type": "cosine",
            "center_rewards_coefficient": 0.01,
        },
        "eval_accuracy",
    ),
    # `rpo_alpha` adds the likelihood of the right answers: without it both answers of a pair may become unlikely.
    "dpo": Stage(
        "DPO", 150, lambda run: dict(run.pairs),
        {
            "per_device_train_batch_size": 64, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "beta": 0.1,
            "rpo_alpha": 0.5,
        },
        "eval_rewards/accuracies",
    ),
    "ppo": Stage(
        "PPO", 150,
        lambda run: {"reward_funcs": run.reward_model, "train_dataset": run.prompts()},
        {
            "per_device_train_batch_size": 128, "num_mini_batches": 2, "num_ppo_epochs": 2, "learning_rate": 6e-4,
            "lr_scheduler_type": "linear", "kl_coef": 0.05, "vf_coef": 0.1, "response_length": MAX_ANSWER_TOKENS,
            "temperature": 0.7,  # a larger share of right samples to learn from
            "stop_token": "eos", "missing_eos_penalty": 3.0,
        },
        package="trl.experimental.ppo",
    ),
    "grpo": Stage("GRPO", 200, group_inputs, _GROUPS),
    "rloo": Stage("RLOO", 200, group_inputs, _GROUPS),
    "teacher": Stage(
        "SFT", 120, teacher_inputs,
        {"per_device_train_batch_size": 64, "learning_rate": 1e-3, "lr_scheduler_type": "linear"},
    ),
    "distillation": Stage(
        "Distillation", 80,
        lambda run: {"teacher_model": run.teacher, "train_dataset": run.prompts()},
        {
            "per_device_train_batch_size": 128, "learning_rate": 1e-3, "lr_scheduler_type": "linear",
            "max_completion_length": MAX_ANSWER_TOKENS,
        },
    ),
}  # fmt: skip

NEXT = """
Model: {folder}/{method}    figures: {folder}/results.json

Train it further, for example:

  trl sft --model_name_or_path {folder}/{method} --dataset_name {folder}/train.jsonl --learning_rate 1e-3 \\
      --output_dir {folder}/more

Use it in Python:

  from transformers import pipeline

  print(pipeline("text-generation", "{folder}/{method}")("sort 7391:", max_new_tokens=5))
"""


def run_stages(stages: Sequence[str], *, output_dir: Path, seed: int, max_steps: int | None, no_color: bool) -> None:
    """Run the named stages; writes models, data, `results.json` and, with matplotlib, `quickstart.png`."""
    started, method = time.perf_counter(), stages[-1]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more do not help a model this small, and would change the figures
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    console = open_console(no_color=no_color, highlight=False, soft_wrap=True)
    output_dir.mkdir(parents=True, exist_ok=True)
    task, tokenizer = make_task(seed=seed), build_tokenizer()
    run = Run(output_dir, seed, max_steps, console, task, tokenizer, build_model(tokenizer, seed=seed))
    console.print(
        f"A model of {run.model.num_parameters():,} weights learns to sort digits. {len(task.train):,} rows to train "
        f"on, {len(task.held_out)} held out. Results are written to {output_dir}/"
    )
    results, answers = [], {"untrained": replies(run.model, tokenizer, task.held_out)}
    for number, name in enumerate(stages, start=1):
        console.print(f"\n[bold]Stage {number} of {len(stages)}: {name}[/bold]")
        begun = time.perf_counter()
        result = {"stage": name, "exact_match": None, **run.train(name)}
        if name != "reward":
            answers[name] = replies((name == "teacher" and run.teacher) or run.model, tokenizer, task.held_out)
            result["exact_match"] = share_right(answers[name], task.held_out)
        results.append({**result, "seconds": time.perf_counter() - begun})
    torch.set_num_threads(threads)
    print_answers(console, task.held_out, answers)
    print_stages(console, results)
    seconds = time.perf_counter() - started
    figures = {"method": method, "seed": seed, "seconds": seconds, "stages": results, "curves": run.curves}
    (output_dir / "results.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    try:
        draw(output_dir / "quickstart.png", run.curves)
        console.print(f"Plot: {output_dir}/quickstart.png")
    except ImportError:
        console.print("No plot: matplotlib is not installed (pip install matplotlib).")
    console.print(NEXT.format(folder=output_dir, method=method), markup=False)
    console.print(f"{seconds:.0f} seconds in all.")


def print_answers(console: Console, held_out: Sequence[Row], answers: Mapping[str, Sequence[str]]) -> None:
    """Print the answers of every stage to some held-out prompts, side by side."""
    table = Table("prompt", *answers, "right", title="Answers to prompts that were never trained", title_justify="left")
    for index, row in enumerate(held_out[:SHOWN_ROWS]):
        texts = [texts[index] for texts in answers.values()]
        colours = ["green" if text == row["completion"] else "red" for text in texts]
        cells = [f"[{colour}]{escape(text)}[/{colour}]" for colour, text in zip(colours, texts, strict=True)]
        table.add_row(row["prompt"], *cells, row["completion"])
    console.print()
    console.print(table)


def print_stages(console: Console, results: Sequence[Mapping[str, object]]) -> None:
    """Print one row per stage: exact match and pair accuracy on held-out prompts, steps and seconds."""
    forms = {"exact_match": ".1%", "pair_accuracy": ".1%", "steps": "d", "seconds": ".0f"}
    table = Table("stage", title="Stage by stage, on held-out prompts", title_justify="left")
    for name in forms:
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        cells = ["-" if result[name] is None else format(result[name], form) for name, form in forms.items()]
        table.add_row(str(result["stage"]), *cells)
    console.print(table)


def draw(path: Path, curves: Mapping[str, Curves]) -> None:
    """Write a PNG with a panel per stage: shares left, rewards and KL right. Raises: ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(curves), 4), layout="constrained")
    figure.suptitle("trl quickstart: a model learns to sort digits")
    panels = figure.subplots(1, len(curves), squeeze=False)
    for axes, (stage, logged) in zip(panels[0], curves.items(), strict=True):
        axes.set(title=stage, xlabel="optimiser step", ylabel="share", ylim=(0, 1.05))
        for name, label in SHARES.items():
            if name in logged:
                axes.plot(*zip(*logged[name], strict=True), marker=".", label=label)
        others = {name: label for name, label in AMOUNTS.items() if name in logged}
        right = axes.twinx() if others else axes
        for colour, (name, label) in zip(("tab:red", "tab:purple"), others.items(), strict=False):
            right.plot(*zip(*logged[name], strict=True), linestyle="--", color=colour, label=label)
        if others:
            right.set_ylabel(", ".join(others.values()))
        lines = [*axes.get_lines(), *(right.get_lines() if others else ())]
        axes.legend(lines, [line.get_label() for line in lines], loc="lower right")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


SHARES = {
    EXACT_MATCH: "exact match", "accuracy": "pair accuracy", "rewards/accuracies": "pair accuracy",
    "rewards/is_right/mean": "right samples",
}  # fmt: skip
AMOUNTS = {
    "objective/scores": "reward", "rewards/margins": "reward margin", "objective/kl": "KL (nats)", "kl": "KL (nats)",
}  # fmt: skip
