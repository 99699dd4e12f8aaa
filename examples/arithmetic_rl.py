"""A small model learns to add from its own answers: GRPO, RLOO, GSPO or VESPO, and one reward, whether an answer is right.

    python examples/arithmetic_rl.py --method grpo --seed 0

builds the tokenizer, the model (half a million random weights) and the sums of `sums.py`, fine-tunes until the model
answers two sums in five that it is trained on, and lets it learn the rest by trying. Every 80 steps it answers 300 sums that
it was never shown. Several methods start from one fine-tuned model. `--out results.jsonl` appends a line of figures for each, of
which `--table results.jsonl` makes a table; nothing is downloaded.
"""

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, disable_progress_bars
from transformers import PrinterCallback, Trainer, TrainerCallback

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

sys.path.append(str(Path(__file__).parent))
from sums import MAX_ANSWER_TOKENS, Task, build_model, build_tokenizer, is_right, make_task, share_right

ENOUGH, GOAL = 0.4, 0.9  # shares of right answers: where fine-tuning stops, and what is to be reached
STEPS, EVERY = 3200, 80  # optimiser steps, and those between two looks

COMMON: dict[str, Any] = {
    "adam_beta2": 0.95, "weight_decay": 0.01, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
    "save_strategy": "no", "use_cpu": True,
}  # fmt: skip
FINE_TUNING: dict[str, Any] = {
    "max_steps": 1000, "per_device_train_batch_size": 64, "learning_rate": 3e-3, "warmup_steps": 50, "logging_steps": 5,
    "lr_scheduler_type": "constant_with_warmup", "assistant_only_loss": True,
}  # fmt: skip
LEARNING: dict[str, Any] = {
    "per_device_train_batch_size": 128, "steps_per_generation": 2, "num_generations": 8, "beta": 0.0,
    "max_completion_length": MAX_ANSWER_TOKENS, "learning_rate": 5e-4, "lr_scheduler_type": "linear", "warmup_steps": 10,
    "logging_steps": EVERY,
}  # fmt: skip


class Method(NamedTuple):
    """A trainer with its config, what it learns from, its settings besides `LEARNING`, and the metric of its curve.

    A run ends after `looks` looks in a row at which the goal is met; 0: after its last step.
    """

    trainer: Any
    config: Any
    given: dict[str, Any]
    settings: dict[str, Any]
    metric: str = "reward"
    looks: int = 0


REWARD = {"reward_funcs": is_right}
METHODS = {
    "grpo": Method(GRPOTrainer, GRPOConfig, REWARD, {}),
    "rloo": Method(RLOOTrainer, RLOOConfig, REWARD, {}),
    "gspo": Method(GRPOTrainer, GRPOConfig, REWARD, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "vespo": Method(GRPOTrainer, GRPOConfig, REWARD, {"loss_type": "vespo"}),
}


@dataclass
class Result:
    """What a run reached, in shares of right answers to sums never shown.

    `curve`: at each look the step, the mean of the method's metric since the last look, and the share reached.
    """

    method: str
    seed: int
    fine_tuned: float
    sft_steps: int
    steps: int
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def reached(self) -> float:
        """What the last step ended with."""
        return self.curve[-1][2]

    @property
    def first_step(self) -> int | None:
        """The first look at which the goal was met."""
        return next((step for step, _, share in self.curve if share >= GOAL), None)


class Look(TrainerCallback):
    """Whenever a loss is logged, `look(step, logs)`; training ends when it answers True."""

    def __init__(self, look: Callable[[int, dict[str, float]], bool | None]) -> None:
        self.look = look

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Look, unless this is the summary at the end."""
        if "loss" in (logs or {}) and self.look(state.global_step, logs):
            control.should_training_stop = True


@dataclass
class Student:
    """A model with its tokenizer and task."""

    task: Task
    tokenizer: Any
    model: Any

    @classmethod
    def fresh(cls, task: Task, *, seed: int) -> "Student":
        """One of random weights."""
        rows = task.conversations()
        tokenizer = build_tokenizer(message["content"] for row in rows for message in row["messages"])
        return cls(task, tokenizer, build_model(tokenizer, seed=seed))


def fine_tune(student: Student, *, seed: int, folder: str, enough: float = ENOUGH) -> int:
    """Imitate right answers until the model gives this share of them itself; returns the steps."""
    trainer = SFTTrainer(
        student.model,
        SFTConfig(folder, **COMMON, **FINE_TUNING, seed=seed),
        train_dataset=Dataset.from_list(student.task.conversations()),
        processing_class=student.tokenizer,
        callbacks=[
            Look(
                lambda step, logs: share_right(student.model, student.tokenizer, student.task.problems[:300]) >= enough
            )
        ],
    )
    return train(trainer)


def learn(method: Method, student: Student, result: Result, *, folder: str) -> None:
    """Learn by trying, and note in `result` what is reached on the way."""

    def look(step: int, logs: dict[str, float]) -> bool:
        share = share_right(student.model, student.tokenizer, student.task.held_out)
        result.curve.append((step, logs[method.metric], share))
        print(
            f"step {step:>4} of {result.steps}   {method.metric} {logs[method.metric]:.3f}   held-out {share:.1%}",
            flush=True,
        )
        last = [each[2] >= GOAL for each in result.curve[-method.looks :]]
        return 0 < method.looks == len(last) and all(last)

    started = time.perf_counter()
    settings = {**COMMON, **LEARNING, **method.settings, "max_steps": result.steps, "seed": result.seed}
    train(
        method.trainer(
            student.model,
            args=method.config(folder, **settings),
            **method.given,
            train_dataset=Dataset.from_list(student.task.prompts()),
            processing_class=student.tokenizer,
            callbacks=[Look(look)],
        )
    )
    result.seconds = round(time.perf_counter() - started, 1)


def train(trainer: Trainer) -> int:
    """Train without printing every log; returns the steps."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.global_step


def run(
    methods: Mapping[str, Method], *, task: Task, seed: int, steps: int, folder: str, enough: float = ENOUGH
) -> list[Result]:
    """Fine-tune once; each method learns from there."""
    student, results = Student.fresh(task, seed=seed), []
    sft_steps = fine_tune(student, seed=seed, folder=folder, enough=enough)
    fine_tuned = share_right(student.model, student.tokenizer, student.task.held_out)
    print(f"after {sft_steps} steps of fine-tuning: held-out {fine_tuned:.1%}", flush=True)
    for name, method in methods.items():
        result = Result(name, seed, fine_tuned, sft_steps, steps)
        learn(
            method,
            Student(student.task, student.tokenizer, copy.deepcopy(student.model)),
            result,
            folder=folder,
        )
        met = "not reached" if result.first_step is None else f"first at step {result.first_step}"
        shares = f"held-out {fine_tuned:.1%} -> {result.reached:.1%}"
        print(f"{name}, seed {seed}: {shares}, {GOAL:.0%} {met}; {result.seconds:.0f} s", flush=True)
        results.append(result)
    return results


def table(results: list[Result], methods: Iterable[str] = METHODS) -> str:
    """A line for each run, in markdown."""
    head = ["| method | seed | after SFT | at the end | first look at 90 % |", "|---|---|---|---|---|"]
    order = list(methods)
    ordered = sorted(results, key=lambda result: (order.index(result.method), result.seed))
    rows = [
        f"| {each.method} | {each.seed} | {each.fine_tuned:.1%} | {each.reached:.1%} | {each.first_step or 'none'} |"
        for each in ordered
    ]
    return "\n".join([*head, *rows])


def main(
    methods: Mapping[str, Method] = METHODS,
    description: str | None = __doc__,
    *,
    steps: int = STEPS,
    enough: float = ENOUGH,
) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--method",
        nargs="+",
        choices=methods,
        default=[next(iter(methods))],
        help="how to learn from the answers",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sums, the weights and the order")
    parser.add_argument("--steps", type=int, default=steps, help="optimiser steps, each from 128 answers")
    parser.add_argument("--out", type=Path, help="jsonl file to which the figures are appended")
    parser.add_argument("--table", type=Path, help="such a file, to be printed as a table; nothing is trained")
    given = parser.parse_args()
    if given.table:
        lines = given.table.read_text(encoding="utf-8").splitlines()
        print(table([Result(**json.loads(line)) for line in lines], methods))
        return
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: methods[name] for name in given.method}
        task = make_task(seed=given.seed)
        results = run(chosen, task=task, seed=given.seed, steps=given.steps, folder=folder, enough=enough)
    if given.out:
        with given.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(result)) + "\n" for result in results)


if __name__ == "__main__":
    main()
