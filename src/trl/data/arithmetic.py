"""Small data sets of word problems, one for each kind of row, made from a seed: nothing is downloaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from datasets import DatasetDict

Row = dict[str, Any]
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "cups", "eggs", "pens", "shells", "stamps")
STORIES = (
    ("{name} has {a} {thing} and buys {b} more.", "+"),
    ("{name} has {a} {thing} and gives away {b} of them.", "-"),
    ("{name} has {a} boxes with {b} {thing} in each.", "*"),
)
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 220)}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an expression of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 3+4."}},
            "required": ["expression"],
        },
    },
}


class Problem(NamedTuple):
    """A word problem, with the number that answers it and a wrong one."""

    story: str
    name: str
    thing: str
    expression: str
    result: int
    mistake: int

    @property
    def question(self) -> str:
        return f"{self.story} How many {self.thing} are there in the end?"

    @property
    def solution(self) -> str:
        """In the form of GSM8K's solutions."""
        step = f"{self.expression} = <<{self.expression}={self.result}>>{self.result}"
        return f"{self.name} has {step} {self.thing}.\n#### {self.result}"

    def sentence(self, result: int) -> str:
        return f"{self.expression} = {result}, so there are {result} {self.thing}."


def draw_problem(draw: random.Random) -> Problem:
    """A problem with numbers from 1 to 12; differences are above 0."""
    story, sign = draw.choice(STORIES)
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.randint(1, 12), draw.randint(1, 12)
    if sign == "-":
        a += b
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    mistake = max(0, result + draw.choice([-2, -1, 1, 2, 10]))
    text = story.format(name=name, a=a, b=b, thing=thing)
    return Problem(text, name, thing, f"{a}{sign}{b}", result, mistake)


def said(role: str, content: Any, **fields: Any) -> Row:
    return {"role": role, "content": content, **fields}


def problem_row(problem: Problem, number: int) -> Row:
    return {"question": problem.question, "answer": problem.solution}


def chat_row(problem: Problem, number: int) -> Row:
    return {
        "messages": [
            said("user", problem.question),
            said("assistant", problem.sentence(problem.result)),
            said("user", "The number alone, please."),
            said("assistant", str(problem.result)),
        ]
    }


def wrong_answer(problem: Problem, number: int) -> str:
    """A wrong number, in two of three rows without the calculation: a small model learns to see that first."""
    return (
        problem.sentence(problem.mistake)
        if number % 3 == 0
        else f"I guess {problem.mistake} {problem.thing}."
    )


def preference_row(problem: Problem, number: int) -> Row:
    question = said("user", problem.question)
    answers = {"chosen": problem.sentence(problem.result), "rejected": wrong_answer(problem, number)}
    return {column: [question, said("assistant", answer)] for column, answer in answers.items()}


def rating_row(problem: Problem, number: int) -> Row:
    is_right = number % 2 == 0
    answer = problem.sentence(problem.result) if is_right else wrong_answer(problem, number)
    return {
        "prompt": [said("user", problem.question)],
        "completion": [said("assistant", answer)],
        "label": is_right,
    }


def step_row(problem: Problem, number: int) -> Row:
    is_right = number % 2 == 0
    result = problem.result if is_right else problem.mistake
    first = f"The numbers give {problem.expression}."
    steps = [first, f"That is {result}.", f"The answer is {result}."]
    return {"prompt": problem.question, "completions": steps, "labels": [True, is_right, is_right]}


def prompt_row(problem: Problem, number: int) -> Row:
    return {"prompt": [said("user", problem.question)], "solution": str(problem.result)}


def tool_row(problem: Problem, number: int) -> Row:
    call = {
        "type": "function",
        "function": {"name": "calculate", "arguments": {"expression": problem.expression}},
    }
    return {
        "messages": [
            said("user", problem.question),
            said("assistant", "", tool_calls=[call]),
            said("tool", str(problem.result), name="calculate"),
            said("assistant", problem.sentence(problem.result)),
        ],
        "tools": [CALCULATOR],
    }


def image_row(problem: Problem, number: int) -> Row:
    from PIL import Image

    name = list(COLOURS)[number % len(COLOURS)]
    shade = [min(255, channel + problem.result % 20) for channel in COLOURS[name]]
    question = [{"type": "image", "text": None}, {"type": "text", "text": "Which colour is it?"}]
    answer = [{"type": "text", "text": f"It is {name}."}]
    return {
        "images": [Image.new("RGB", (32, 32), tuple(shade))],
        "messages": [said("user", question), said("assistant", answer)],
    }


# Each with the columns of a data set on the Hub (docs/reference/data_formats.md), so that commands work for both.
ROWS: dict[str, Callable[[Problem, int], Row]] = {
    "problems": problem_row,
    "chats": chat_row,
    "preferences": preference_row,
    "ratings": rating_row,
    "steps": step_row,
    "prompts": prompt_row,
    "tools": tool_row,
    "images": image_row,
}


def make_rows(name: str, *, rows: int = 400, seed: int = 0) -> dict[str, list[Row]]:
    """The rows of `make_data`, by split."""
    if name not in ROWS:
        raise ValueError(f"name must be one of {', '.join(ROWS)}, got {name!r}.")
    if not 8 <= rows <= 10_000:  # there are about 24,000 problems
        raise ValueError(f"rows must be from 8 to 10000, got {rows}.")
    draw, problems = random.Random(seed), dict[str, Problem]()
    while len(problems) < rows + rows // 8:
        problem = draw_problem(draw)
        problems.setdefault(problem.story, problem)
    all_rows = [ROWS[name](problem, number) for number, problem in enumerate(problems.values())]
    return {"train": all_rows[:rows], "test": all_rows[rows:]}


def make_data(name: str, *, rows: int = 400, seed: int = 0) -> DatasetDict:
    """A data set of small word problems (of colours for images), with the splits `train` and `test`.

    `name` is a kind of row: "problems" (`question`, `answer`), "chats" (`messages`), "preferences" (`chosen`, `rejected`),
    "ratings" (`prompt`, `completion`, `label`), "steps" (`prompt`, `completions`, `labels`), "prompts" (`prompt`, `solution`),
    "tools" (`messages`, `tools`) or "images" (`images`, `messages`; needs Pillow). `train` has `rows` rows, `test` an eighth as
    many, of other problems. The same seed gives the same rows.

    Raises: ValueError for an unknown name and for fewer than 8 rows.

    >>> make_data("problems", rows=8)["train"].column_names
    ['question', 'answer']
    """
    from datasets import Dataset, DatasetDict

    splits = make_rows(name, rows=rows, seed=seed)
    return DatasetDict({split: Dataset.from_list(part) for split, part in splits.items()})
