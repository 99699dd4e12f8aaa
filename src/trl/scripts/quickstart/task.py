"""The arithmetic task: problems, the conversations made of them, and the checker of answers."""

import random
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]

PHRASINGS = (
    "What is {left} + {right}?",
    "Compute {left} + {right}.",
    "How much is {left} + {right}?",
    "Please work out {left} + {right}.",
    "Calculate {left} + {right}.",
    "Tell me {left} + {right}.",
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum, and the number of the phrasing in which it is asked."""

    left: int
    right: int
    phrasing: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """What makes two problems the same whatever their order and phrasing: 23 + 48 is 48 + 23."""
        return min(self.left, self.right), max(self.left, self.right)


@dataclass(frozen=True)
class Task:
    """Problems to train on and problems held out; no held-out sum is trained on in any order or phrasing."""

    problems: tuple[Problem, ...]
    held_out: tuple[Problem, ...]

    def __post_init__(self) -> None:
        shared = {problem.key for problem in self.problems} & {problem.key for problem in self.held_out}
        if shared:
            raise ValueError(
                f"held-out problems must not be trained on, got {len(shared)} in both, for example "
                f"{sorted(shared)[0]}. Split by Problem.key."
            )

    def question(self, problem: Problem) -> str:
        """The problem in words."""
        return PHRASINGS[problem.phrasing].format(left=problem.left, right=problem.right)

    def prompt_messages(self, problem: Problem) -> list[Message]:
        """The conversation up to where the model answers."""
        return [{"role": "user", "content": self.question(problem)}]

    def answer(self, problem: Problem) -> str:
        """The right answer."""
        return str(problem.left + problem.right)

    def is_correct(self, problem: Problem, text: str) -> bool:
        """Whether a reply is the right number and nothing else; space around it does not matter."""
        return text.strip() == self.answer(problem)

    def messages(self, problem: Problem) -> list[Message]:
        """The whole conversation, right answer included."""
        return [*self.prompt_messages(problem), {"role": "assistant", "content": self.answer(problem)}]

    def slip(self, problem: Problem, place: int, draw: random.Random) -> str:
        """A wrong answer as careless adding gives it: the right one but for the digit of this place (1, 10)."""
        right = problem.left + problem.right
        digit = right // place % 10
        other = draw.choice([other for other in range(10) if other != digit])
        return str(right + (other - digit) * place)

    def pair(self, problem: Problem, wrong: str) -> dict[str, list[Message]]:
        """A preference row: the right answer is chosen, a wrong one rejected."""
        return {
            "prompt": self.prompt_messages(problem),
            "chosen": [{"role": "assistant", "content": self.answer(problem)}],
            "rejected": [{"role": "assistant", "content": wrong}],
        }

    def train_rows(self) -> list[dict[str, Any]]:
        """Rows for `SFTTrainer`: a conversation each."""
        return self.rows(self.problems)

    def rows(self, problems: tuple[Problem, ...]) -> list[dict[str, Any]]:
        """Conversational rows of these problems, right answers included."""
        return [{"messages": self.messages(problem)} for problem in problems]


def make_task(*, largest_sum: int, held_out: int, seed: int) -> Task:
    """All sums of two numbers that come to `largest_sum` at most, `held_out` of them kept back; `seed` shuffles.

    A held-out sum of two different numbers is kept back in both orders and asked in one of them.
    """
    draw = random.Random(seed)
    keys = [(left, right) for left in range(largest_sum + 1) for right in range(left, largest_sum - left + 1)]
    draw.shuffle(keys)
    if not 0 < held_out < len(keys):
        raise ValueError(f"held_out must lie between 1 and {len(keys) - 1}, got {held_out}. Choose fewer.")
    kept_back = [_ask(draw, *draw.sample(key, 2)) for key in keys[:held_out]]
    orders = [order for key in keys[held_out:] for order in sorted({key, key[::-1]})]
    train = [_ask(draw, *order) for order in orders]
    draw.shuffle(train)
    return Task(problems=tuple(train), held_out=tuple(kept_back))


def _ask(draw: random.Random, left: int, right: int) -> Problem:
    return Problem(left, right, draw.randrange(len(PHRASINGS)))
