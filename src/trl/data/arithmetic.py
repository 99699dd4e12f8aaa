"""Small data sets of word problems, one for each kind of row, made from a seed: nothing is downloaded."""

import random
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


def said(role: str, content: object, **fields: object) -> Row:
    return {"role": role, "content": content, **fields}


# Each with the columns of a data set on the Hub (docs/reference/data_formats.md), so that commands work for both.
ROWS = ("problems", "chats", "preferences", "ratings", "steps", "prompts", "tools", "images")


def make_row(name: str, problem: Problem, number: int) -> Row:
    """A row of the data set `name`; of ratings and steps those of an even number are right."""
    question, answer, is_right = (said("user", problem.question), problem.sentence(problem.result), number % 2 == 0)
    # In two of three rows without the calculation: a small model learns to see that first.
    guess = f"I guess {problem.mistake} {problem.thing}."
    wrong = problem.sentence(problem.mistake) if number % 3 == 0 else guess
    match name:
        case "problems":
            return {"question": problem.question, "answer": problem.solution}
        case "chats":
            more = said("user", "The number alone, please."), said("assistant", str(problem.result))
            return {"messages": [question, said("assistant", answer), *more]}
        case "preferences":
            texts = {"chosen": answer, "rejected": wrong}
            return {column: [question, said("assistant", text)] for column, text in texts.items()}
        case "ratings":
            completion = [said("assistant", answer if is_right else wrong)]
            return {"prompt": [question], "completion": completion, "label": is_right}
        case "steps":
            result = problem.result if is_right else problem.mistake
            steps = [f"The numbers give {problem.expression}.", f"That is {result}.", f"The answer is {result}."]
            return {"prompt": problem.question, "completions": steps, "labels": [True, is_right, is_right]}
        case "prompts":
            return {"prompt": [question], "solution": str(problem.result)}
        case "tools":
            call = {"name": "calculate", "arguments": {"expression": problem.expression}}
            calling = said("assistant", "", tool_calls=[{"type": "function", "function": call}])
            result = said("tool", str(problem.result), name="calculate")
            return {"messages": [question, calling, result, said("assistant", answer)], "tools": [CALCULATOR]}
        case _:
            return image_row(problem, number)


def image_row(problem: Problem, number: int) -> Row:
    """A square of one colour, and its name."""
    from PIL import Image

    name = list(COLOURS)[number % len(COLOURS)]
    shade = tuple(min(255, channel + problem.result % 20) for channel in COLOURS[name])
    question = [{"type": "image", "text": None}, {"type": "text", "text": "Which colour is it?"}]
    answer = [{"type": "text", "text": f"It is {name}."}]
    messages = [said("user", question), said("assistant", answer)]
    return {"images": [Image.new("RGB", (32, 32), shade)], "messages": messages}


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
    all_rows = [make_row(name, problem, number) for number, problem in enumerate(problems.values())]
    return {"train": all_rows[:rows], "test": all_rows[rows:]}


def make_data(name: str, *, rows: int = 400, seed: int = 0) -> "DatasetDict":
    """A data set of small word problems (of colours for images), with the splits `train` and `test`.

    `name` is a kind of row: "problems" (`question`, `answer`), "chats" (`messages`), "preferences" (`chosen`,
    `rejected`), "ratings" (`prompt`, `completion`, `label`), "steps" (`prompt`, `completions`, `labels`), "prompts"
    (`prompt`, `solution`), "tools" (`messages`, `tools`) or "images" (`images`, `messages`; needs Pillow). `train` has
    `rows` rows, `test` an eighth as many, of other problems. The same seed gives the same rows. Raises: ValueError for
    an unknown name, and for fewer than 8 or more than 10,000 rows.

    >>> make_data("problems", rows=8)["train"].column_names
    ['question', 'answer']
    """
    from datasets import Dataset, DatasetDict

    splits = make_rows(name, rows=rows, seed=seed)
    return DatasetDict({split: Dataset.from_list(part) for split, part in splits.items()})
