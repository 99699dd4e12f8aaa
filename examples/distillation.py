"""On-policy distillation against GRPO: a student of two layers learns to add from a teacher of four.

    python examples/distillation.py --seed 0

builds the tokenizer, the models (random weights) and the sums of `sums.py`. The teacher is fine-tuned until it answers nearly
all sums that it is trained on, the student until it answers two in five. Then the student completes prompts and learns the
teacher's distributions at its own tokens, until it answers as many held-out sums as the teacher, up to two points. GRPO, with the
reward of a right answer, starts from the same student and has three times as many samples. `--out results.jsonl` appends a line of
figures for each seed, of which `--table results.jsonl` makes a table; nothing is downloaded.
"""

import argparse
import copy
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars

from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

sys.path.append(str(Path(__file__).parent))
from arithmetic_rl import COMMON, FINE_TUNING, LEARNING, Look, Student, fine_tune, train
from sums import MAX_ANSWER_TOKENS, Task, build_model, is_right, make_task, share_right

TEACHER_KNOWS = 0.995  # share of right answers to sums that the teacher is trained on, where its fine-tuning stops
WITHIN = 0.02  # of the teacher's share of right answers to held-out sums: where distillation stops
STEPS, EVERY, SAMPLES = (
    1000,
    10,
    128,
)  # the most optimiser steps, those between two looks, and the completions of each

TEACHING: dict[str, Any] = {
    **FINE_TUNING, "max_steps": 4000, "per_device_train_batch_size": 128, "learning_rate": 1e-3, "logging_steps": 25,
}  # fmt: skip
DISTILLING: dict[str, Any] = {
    "per_device_train_batch_size": SAMPLES, "max_completion_length": MAX_ANSWER_TOKENS, "learning_rate": 2e-3,
    "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10, "logging_steps": EVERY, "beta": 1.0,
}  # fmt: skip


@dataclass
class Result:
    """Shares of right answers to held-out sums: of the teacher, of the student before, and (samples, share) at each look."""

    seed: int
    teacher: float
    student: float
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def reached(self, method: str) -> float:
        """The last look's share."""
        return self.curves[method][-1][1]

    def samples(self, method: str) -> int:
        """The completions until then."""
        return self.curves[method][-1][0]


def teach(student: Student, *, seed: int, folder: str) -> Any:
    """A teacher with the student's tokenizer and task."""
    model, task = build_model(student.tokenizer, seed=seed + 1, layers=4), student.task
    look = Look(lambda step, logs: share_right(model, student.tokenizer, task.problems[:300]) >= TEACHER_KNOWS)
    train(
        SFTTrainer(
            model,
            SFTConfig(folder, **COMMON, **TEACHING, seed=seed),
            train_dataset=Dataset.from_list(task.conversations()),
            processing_class=student.tokenizer,
            callbacks=[look],
        )
    )
    return model


def learn(method: str, student: Student, teacher: Any, result: Result, *, steps: int, folder: str) -> None:
    """Learn for at most `steps` optimiser steps, until the student is within two points of the teacher."""
    model, tokenizer, task = copy.deepcopy(student.model), student.tokenizer, student.task
    curve = result.curves.setdefault(method, [])

    def look(step: int, logs: dict[str, float]) -> bool:
        curve.append((step * SAMPLES, share_right(model, tokenizer, task.held_out)))
        return curve[-1][1] >= result.teacher - WITHIN

    common = {
        "train_dataset": Dataset.from_list(task.prompts()),
        "processing_class": tokenizer,
        "callbacks": [Look(look)],
    }
    own = {"max_steps": steps, "seed": result.seed}
    started = time.perf_counter()
    if method == "distillation":
        config = DistillationConfig(folder, **COMMON, **DISTILLING, **own)
        train(DistillationTrainer(model, teacher, config, **common))
    else:
        settings = {**LEARNING, "steps_per_generation": None, "logging_steps": EVERY}
        train(GRPOTrainer(model, is_right, GRPOConfig(folder, **COMMON, **settings, **own), **common))
    result.seconds[method] = round(time.perf_counter() - started, 1)
    print(
        f"{method}, seed {result.seed}: held-out {result.student:.1%} -> {result.reached(method):.1%} (teacher "
        f"{result.teacher:.1%}) with {result.samples(method):,} samples; {result.seconds[method]:.0f} s",
        flush=True,
    )


def run(task: Task, *, seed: int, folder: str, steps: int = STEPS) -> Result:
    """Both methods, from one student."""
    student = Student.fresh(task, seed=seed)
    fine_tune(student, seed=seed, folder=folder)
    teacher = teach(student, seed=seed, folder=folder)
    shares = [share_right(model, student.tokenizer, task.held_out) for model in (teacher, student.model)]
    result = Result(seed, *shares)
    print(f"teacher: held-out {result.teacher:.1%}; student: {result.student:.1%}", flush=True)
    learn("distillation", student, teacher, result, steps=steps, folder=folder)
    learn("grpo", student, teacher, result, steps=3 * result.samples("distillation") // SAMPLES, folder=folder)
    return result


def table(results: list[Result]) -> str:
    """A line for each seed, in markdown."""
    head = [
        "| seed | teacher | student | after distillation | samples | after GRPO | samples |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [
        f"| {each.seed} | {each.teacher:.1%} | {each.student:.1%} | {each.reached('distillation'):.1%} | "
        f"{each.samples('distillation'):,} | {each.reached('grpo'):.1%} | {each.samples('grpo'):,} |"
        for each in sorted(results, key=lambda result: result.seed)
    ]
    return "\n".join([*head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of sums, weights and order")
    parser.add_argument("--out", type=Path, help="jsonl file to which the figures are appended")
    parser.add_argument("--table", type=Path, help="such a file, to be printed as a table; nothing is trained")
    given = parser.parse_args()
    if given.table:
        lines = given.table.read_text(encoding="utf-8").splitlines()
        print(table([Result(**json.loads(line)) for line in lines]))
        return
    disable_progress_bars()
    for seed in given.seed:
        with tempfile.TemporaryDirectory() as folder:
            result = run(make_task(seed=seed), seed=seed, folder=folder)
        if given.out:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
