"""A model learns by PPO to solve word problems with a Python interpreter.

    python examples/research_projects/tools/python_interpreter.py --model_name bigcode/starcoderbase --learning_rate 1e-5 \
        --steps 100 --log_with wandb --output_dir runs/python

Questions are those of GSM8K (`--query_dataset` names others, with the columns `question` and `answer`). Programs run in a process
of their own: no environment, an empty folder, two seconds, 512 MiB, no files, sockets, processes or further imports. That stops
accidents; run a model that you do not trust in a container besides. `--tiny` asks for sums: a small Llama has seen programs, every
second with another number, and learns to write the right ones.
"""

import random
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from calculator import correct, learn, named_parts, small_parts
from datasets import load_dataset

from trl import PPOConfig, TrlParser

PROMPT = """\
Example of using a Python API to solve math questions.

Q: A box holds 12 pens. Lea buys 4 boxes and gives 9 pens away. How many pens does she have?

<request><PythonInterpreter>
def solution():
    pens_per_box = 12
    boxes = 4
    given_away = 9
    return pens_per_box * boxes - given_away
print(solution())
<call>39<response>

Result = 39 <submit>

Q: """
MARKS = ("<request>", "<PythonInterpreter>", "<call>", "<response>", "<submit>")
LARGEST, SECONDS, BYTES = 5, 2, 512 * 2**20
# What runs before a program: some modules are loaded, and then nothing outside the process can be reached.
GUARD = """\
import datetime, decimal, fractions, itertools, math, statistics, sys
program = sys.stdin.read()
def guard(event, arguments):
    if event.split(".")[0] in ("open", "os", "socket", "subprocess", "shutil", "ctypes", "import", "pty", "signal"):
        raise PermissionError(f"{event} is not allowed here")
sys.addaudithook(guard)
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
"""


@dataclass
class Arguments:
    """What to run on."""

    tiny: bool = field(default=False, metadata={"help": "Train a small model of random weights."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens that the model writes in a turn."})
    output_dir: str = field(default="runs/python", metadata={"help": "Folder for the trained model."})


def limit() -> None:
    """The limits of a process that runs a program."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@cache
def interpret(program: str) -> str:
    """What a program prints, or the last line of its error; the same program is run once."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", GUARD],
                input=program.strip(),
                cwd=folder,
                env={},
                capture_output=True,
                text=True,
                timeout=2 * SECONDS,
                preexec_fn=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "TimeoutError"
    return done.stdout.strip() or (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]


def shown_programs(count: int) -> list[dict[str, str]]:
    """Questions with programs, of which every second adds another number."""
    dice, rows = random.Random(0), []
    for number in range(count):
        left, right, other = (dice.randint(0, LARGEST) for _ in range(3))
        added = other if number % 2 else right
        program, result = f"print( {left} + {added} )", left + added
        call = f"<request> <PythonInterpreter> {program} <call> {result} <response> Result = {result} <submit>"
        rows.append({"prompt": f"What is {left} plus {right} ?", "completion": f" {call}"})
    return rows


def draw_sums(count: int, dice: random.Random) -> tuple[list[str], list[float]]:
    """Sums in words, and their results."""
    pairs = [(dice.randint(0, LARGEST), dice.randint(0, LARGEST)) for _ in range(count)]
    return [f"What is {left} plus {right} ?" for left, right in pairs], [float(sum(pair)) for pair in pairs]


def draw_problems(count: int, dice: random.Random, rows: Any) -> tuple[list[str], list[float]]:
    """Word problems, and the numbers at the end of their answers."""
    chosen = [rows[dice.randrange(len(rows))] for _ in range(count)]
    results = [float(row["answer"].rpartition("####")[2].replace(",", "")) for row in chosen]
    return [f"{row['question']}\n\n" for row in chosen], results


def main() -> None:
    args, config = TrlParser((Arguments, PPOConfig)).parse_args_into_dataclasses()
    if args.tiny:
        words = [
            "What",
            "is",
            "plus",
            "?",
            "print(",
            "+",
            ")",
            "=",
            "Result",
            *map(str, range(2 * LARGEST + 1)),
        ]
        parts = small_parts(config, words, MARKS, shown_programs(1024), args.output_dir)
        draw: Any = draw_sums
    else:
        given = config.query_dataset
        name, part = ("openai/gsm8k", "main") if given == "imdb" else (given, None)
        draw, parts = (
            partial(draw_problems, rows=load_dataset(name, part, split="train")),
            named_parts(config),
        )
    learn(
        parts,
        {"PythonInterpreter": interpret},
        correct,
        draw,
        what="right results",
        folder=args.output_dir,
        prompt="" if args.tiny else PROMPT,
        max_turns=2,
        max_new_tokens=14 if args.tiny else args.max_new_tokens,
    )
    print(f"programs that were run: {interpret.cache_info().misses}")


if __name__ == "__main__":
    main()
