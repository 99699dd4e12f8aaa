"""A model learns by PPO to look things up: a search over a local corpus, and a reward for the right answer.

    python examples/research_projects/tools/triviaqa.py --model_name bigcode/starcoderbase --corpus wikipedia.jsonl \
        --iterations 100 --log_with wandb --output_dir runs/triviaqa

`--corpus` is a jsonl file with a `text` in each row; the tool answers with the first paragraph that BM25 ranks highest. Questions
are those of TriviaQA (`--query_dataset` names others, with the columns `question` and `answer`). `--tiny` has a corpus of a few
sentences: a small Llama has seen searches, every third for somebody else, and learns whom to search for.
"""

import json
import math
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from calculator import learn, named_parts, small_parts
from datasets import load_dataset

from trl import PPOConfig, TrlParser

PROMPT = """\
Answer the following question:

Q: Which river flows through Prague?
A2: <request><Wiki>river Prague<call>Prague is the capital of the Czech Republic. It lies on the Vltava river.<response>
Result=Vltava<submit>

Q: Who wrote the opera Fidelio?
A2: <request><Wiki>opera Fidelio<call>Fidelio is the only opera by Ludwig van Beethoven, first performed in 1805.<response>
Result=Ludwig van Beethoven<submit>

Q: """
MARKS = ("<request>", "<Wiki>", "<call>", "<response>", "<submit>")
HOMES = {
    "Ada": "London", "Emmy": "Erlangen", "Srinivasa": "Erode", "Sofia": "Moscow", "Kurt": "Brno", "Maryam": "Tehran",
    "Niels": "Oslo", "Henri": "Nancy",
}  # fmt: skip


@dataclass
class Arguments:
    """What to run on."""

    tiny: bool = field(default=False, metadata={"help": "Train a small model of random weights."})
    corpus: str | None = field(default=None, metadata={"help": "Jsonl file whose rows have a `text`."})
    iterations: int | None = field(default=None, metadata={"help": "Steps of PPO. None: those of `steps`."})
    max_new_tokens: int = field(default=32, metadata={"help": "Tokens that the model writes in a turn."})
    output_dir: str = field(default="runs/triviaqa", metadata={"help": "Folder for the trained model."})


class Wiki:
    """A search: the first paragraph of the text that BM25 (k1 = 0.9, b = 0.4) ranks highest for a query."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.counts = [Counter(self.words(text)) for text in texts]
        self.lengths = [sum(counts.values()) for counts in self.counts]
        self.found_in = Counter(word for counts in self.counts for word in counts)
        self.calls = 0

    @staticmethod
    def words(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    def score(self, number: int, words: list[str]) -> float:
        """How well a text fits the words."""
        counts, total = self.counts[number], 0.0
        relative_length = self.lengths[number] * len(self.texts) / sum(self.lengths)
        for word in words:
            rarity = math.log(1 + (len(self.texts) - self.found_in[word] + 0.5) / (self.found_in[word] + 0.5))
            total += rarity * counts[word] / (counts[word] + 0.9 * (0.6 + 0.4 * relative_length))
        return total

    def __call__(self, query: str) -> str:
        self.calls += 1
        words = self.words(query)
        best = max(range(len(self.texts)), key=lambda number: self.score(number, words))
        return self.texts[best].strip().split("\n")[0] if self.score(best, words) > 0 else "Nothing found."


def contains_answer(texts: list[str], answers: list[list[str]]) -> list[float]:
    """1 where what follows `Result=` has one of the accepted answers in it, else 0."""
    results = [text.rpartition("Result")[2].lower() for text in texts]
    return [
        float(any(one.lower() in said for one in accepted)) for said, accepted in zip(results, answers, strict=True)
    ]


def shown_searches(count: int) -> list[dict[str, str]]:
    """Questions with searches, of which every third is for somebody else."""
    dice, names, rows = random.Random(0), list(HOMES), []
    for number in range(count):
        name = dice.choice(names)
        sought = dice.choice(names) if number % 3 == 0 else name
        found = f"{sought} was born in {HOMES[sought]}"
        call = f"<request> <Wiki> {sought} <call> {found} <response> Result = {HOMES[sought]} <submit>"
        rows.append({"prompt": f"Where was {name} born ?", "completion": f" {call}"})
    return rows


def draw(count: int, dice: random.Random, rows: list[tuple[str, list[str]]]) -> tuple[list[str], list[list[str]]]:
    """Questions and their accepted answers."""
    chosen = dice.choices(rows, k=count)
    return [question for question, _ in chosen], [accepted for _, accepted in chosen]


def trivia(name: str) -> list[tuple[str, list[str]]]:
    """The questions of a data set, with every answer that it accepts."""
    rows: Any = load_dataset(name, *(["rc.nocontext"] if name.endswith("trivia_qa") else []), split="train")
    accepted = [row["answer"]["aliases"] if isinstance(row["answer"], dict) else [row["answer"]] for row in rows]
    return [(f"{question}\n", each) for question, each in zip(rows["question"], accepted, strict=True)]


def main() -> Wiki:
    args, config = TrlParser((Arguments, PPOConfig)).parse_args_into_dataclasses()
    config = replace(config, steps=args.iterations or config.steps)
    if args.tiny:
        wiki = Wiki([f"{name} was born in {home}" for name, home in HOMES.items()])
        rows = [(f"Where was {name} born ?", [home]) for name, home in HOMES.items()]
        words = ["Where", "was", "born", "in", "?", "=", "Result", *HOMES, *HOMES.values()]
        parts = small_parts(config, words, MARKS, shown_searches(1024), args.output_dir)
    elif args.corpus is None:
        sys.exit("Give --corpus, a jsonl file whose rows have a `text`, or --tiny.")
    else:
        lines = Path(args.corpus).read_text(encoding="utf-8").splitlines()
        wiki = Wiki([json.loads(line)["text"] for line in lines])
        name = config.query_dataset
        rows, parts = trivia("mandarjoshi/trivia_qa" if name == "imdb" else name), named_parts(config)
    learn(
        parts,
        {"Wiki": wiki},
        contains_answer,
        partial(draw, rows=rows),
        what="right answers",
        folder=args.output_dir,
        prompt="" if args.tiny else PROMPT,
        max_turns=2,
        max_tool_reponse=400,
        max_new_tokens=12 if args.tiny else args.max_new_tokens,
    )
    print(f"searches: {wiki.calls}")
    return wiki


if __name__ == "__main__":
    wiki = main()
