"""A new skill beside old ones, from worked solutions: SDFT against SFT.

    python examples/self_distillation.py --seed 0

builds the tokenizer and the model (random weights) of `sums.py`. The model first learns sums, the larger and the smaller of two
numbers, and to repeat the result of a note below a question; these results are random numbers. Then it is taught differences from
worked solutions, in copies of the same model: by SFT, which imitates them, and by SDFT, where only the teacher, the model before,
is shown them as a note. Each ends when it answers 95 % of the differences; then all questions are counted again. `--out
results.jsonl` appends a line of figures for each seed, of which `--table results.jsonl` makes a table; nothing is downloaded.
"""

import argparse
import copy
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars

from trl import SFTConfig, SFTTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine

sys.path.append(str(Path(__file__).parent))
from arithmetic_rl import COMMON, FINE_TUNING, Look, train
from sums import Message, build_model, build_tokenizer

LARGEST = 9  # number of a question
KNOWS, LEARNT = 0.97, 0.95  # shares of right answers where the first stage and the teaching end
LONGEST = 24  # tokens of an answer
STEPS, EVERY = 400, 20  # the most optimiser steps of the teaching, and those between two looks

KINDS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "sum": ("What is {} + {}?", lambda left, right: left + right),
    "larger": ("Which is larger, {} or {}?", max),
    "smaller": ("Which is smaller, {} or {}?", min),
    "difference": ("Take {1} from {0}.", lambda left, right: left - right),
}
KNOWN, NEW = ("sum", "larger", "smaller"), "difference"
FIRST: dict[str, Any] = {
    **FINE_TUNING, "max_steps": 2000, "logging_steps": 50, "learning_rate": 2e-3, "per_device_train_batch_size": 32,
}  # fmt: skip
TEACHING: dict[str, Any] = {
    "learning_rate": 2e-4, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10, "logging_steps": EVERY,
    "per_device_train_batch_size": 32, "max_steps": STEPS,
}  # fmt: skip
SELF: dict[str, Any] = {
    "num_generations": 1, "distillation_mode": "full_logits", "teacher_model_kind": "base", "max_completion_length": LONGEST,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "SFT": {},
    "SDFT": {**SELF, "distillation_alpha": 0.5},
    "SDFT, forward KL": {**SELF, "distillation_alpha": 0.0},
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question about two numbers."""

    kind: str
    left: int
    right: int

    @property
    def text(self) -> str:
        """The question."""
        return KINDS[self.kind][0].format(self.left, self.right)

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(KINDS[self.kind][1](self.left, self.right))

    def solution(self, answer: str) -> str:
        """A worked solution with this answer."""
        return f"{self.left} and {self.right}: the {self.kind} is {answer}, so the answer is {answer}."


def questions(*kinds: str) -> list[Question]:
    """All questions of some kinds; differences are not negative."""
    numbers = range(LARGEST + 1)
    pairs = [(left, right) for left in numbers for right in numbers]
    return [Question(kind, *pair) for kind in kinds for pair in pairs if kind != NEW or pair[1] <= pair[0]]


def prompt(text: str) -> list[Message]:
    """A message of the user."""
    return [{"role": "user", "content": text}]


def answered(text: str, answer: str) -> dict[str, Any]:
    """A row for `SFTTrainer`."""
    return {"messages": [*prompt(text), {"role": "assistant", "content": answer}]}


def share_right(model: Any, tokenizer: Any, asked: Sequence[Question], *, noted: bool = False) -> float:
    """Share of greedy answers whose last number is right; `noted` questions have their solution below."""
    training = model.training
    model.eval()
    texts = [each.text + (f"\n\n{each.solution(each.answer)}" if noted else "") for each in asked]
    template = {"add_generation_prompt": True, "return_dict": False}
    ids = [tokenizer.apply_chat_template(prompt(text), **template) for text in texts]
    sampling = Sampling(max_new_tokens=LONGEST, do_sample=False, seed=0)
    found = TransformersEngine(model, tokenizer=tokenizer).generate(ids, sampling)
    model.train(training)
    said = tokenizer.batch_decode([each.ids for each in found], skip_special_tokens=True)
    right = [re.findall(r"\d+", text)[-1:] == [each.answer] for text, each in zip(said, asked, strict=True)]
    return round(sum(right) / len(right), 3)


def shares(model: Any, tokenizer: Any) -> dict[str, float]:
    """The share of right answers of each kind."""
    return {kind: share_right(model, tokenizer, questions(kind)) for kind in KINDS}


def mean_known(found: dict[str, float]) -> float:
    """The mean share of the kinds that were known before."""
    return sum(found[kind] for kind in KNOWN) / len(KNOWN)


@dataclass
class Result:
    """Shares of right answers of each kind: before, and (steps, shares) of each method at the end."""

    seed: int
    before: dict[str, float]
    after: dict[str, tuple[int, dict[str, float]]] = field(default_factory=dict)


def learn_first(*, seed: int, folder: str) -> tuple[Any, Any]:
    """The model and its tokenizer, after its first stage."""
    draw, known, new = random.Random(seed), questions(*KNOWN), questions(NEW)
    rows = [answered(each.text, each.answer) for each in known]
    for each in (*known, *new, *new):
        result = str(draw.randrange(2 * LARGEST + 1))
        rows.append(answered(f"{each.text}\n\n{each.solution(result)}", result))
    texts = (message["content"] for row in rows for message in row["messages"])
    tokenizer = build_tokenizer(texts, vocab_size=400)
    model = build_model(tokenizer, seed=seed)

    def look(step: int, logs: dict[str, float]) -> bool:
        found = share_right(model, tokenizer, known), share_right(model, tokenizer, new, noted=True)
        return min(found) >= KNOWS

    common: dict[str, Any] = {"processing_class": tokenizer, "callbacks": [Look(look)]}
    config = SFTConfig(folder, **COMMON, **FIRST, seed=seed)
    train(SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), **common))
    return model, tokenizer


def teach(method: str, model: Any, tokenizer: Any, *, seed: int, folder: str) -> tuple[int, dict[str, float]]:
    """Teach differences to a copy of the model; the steps that it took, and what the copy knows then."""
    model, new = copy.deepcopy(model), questions(NEW)

    def look(step: int, logs: dict[str, float]) -> bool:
        return share_right(model, tokenizer, new) >= LEARNT

    given = {**COMMON, **TEACHING, **METHODS[method], "seed": seed}
    common: dict[str, Any] = {"processing_class": tokenizer, "callbacks": [Look(look)]}
    solutions = [each.solution(each.answer) for each in new]
    if method == "SFT":
        rows = [answered(each.text, solution) for each, solution in zip(new, solutions, strict=True)]
        config: Any = SFTConfig(folder, **given, assistant_only_loss=True)
        trainer: Any = SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), **common)
    else:
        pairs = zip(new, solutions, strict=True)
        rows = [{"prompt": prompt(each.text), "privileged_context": solution} for each, solution in pairs]
        trainer = SDFTTrainer(model, SDFTConfig(folder, **given), Dataset.from_list(rows), **common)
    return train(trainer), shares(model, tokenizer)


def run(*, seed: int, folder: str, methods: Sequence[str] = tuple(METHODS)) -> Result:
    """All methods, from one model."""
    model, tokenizer = learn_first(seed=seed, folder=folder)
    result = Result(seed, shares(model, tokenizer))
    for method in methods:
        result.after[method] = steps, found = teach(method, model, tokenizer, seed=seed, folder=folder)
        print(
            f"{method}, seed {seed}: differences {result.before[NEW]:.1%} -> {found[NEW]:.1%} in {steps} steps, what was known "
            f"{mean_known(result.before):.1%} -> {mean_known(found):.1%} {found}",
            flush=True,
        )
    return result


def table(results: list[Result]) -> str:
    """A line for each run, in markdown."""
    head = [
        "| method | seed | differences | steps | known before | known after | sums | larger | smaller |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [
        f"| {method} | {each.seed} | {found[NEW]:.1%} | {steps} | {mean_known(each.before):.1%} | {mean_known(found):.1%} | "
        + " | ".join(f"{found[kind]:.0%}" for kind in KNOWN)
        + " |"
        for method in METHODS
        for each in sorted(results, key=lambda result: result.seed)
        for steps, found in [each.after[method]]
    ]
    return "\n".join([*head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of weights, notes and order")
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
            result = run(seed=seed, folder=folder)
        if given.out:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
