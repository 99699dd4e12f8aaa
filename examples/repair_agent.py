"""An agent that repairs small programs, trained through OpenAI's API, in a sandbox without a network.

    python examples/repair_agent.py --tiny --seed 0 --output_dir runs/repair --out runs/repair.jsonl
    python examples/repair_agent.py --table runs/repair.jsonl

Each task is a repository of one or two files and tests that fail. The agent (`repair`, over the `openai` client) reads and writes
files and runs the tests in a sandbox, and its reward is the share of hidden tests that pass, or the similarity to the true patch.
With `--tiny` the policy is a two-layer Llama of random weights that has seen some conversations, and the reward is that of an easier
task: whether its first call reads the file whose test fails. `--model NAME --reward tests` trains a real model on the whole task.
"""

import argparse
import asyncio
import contextlib
import difflib
import functools
import hashlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai
from datasets import Dataset
from small_model import small_llama
from transformers.utils import get_json_schema

import tiny
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

# ---- The tasks: name, file, its content, what is wrong in it, what is right, and the hidden tests

TASKS: list[tuple[str, str, str, str, str, str]] = [
    ("add", "sums.py", "def add(a, b):\n    return {}\n", "a - b", "a + b", "from sums import add\nassert add(2, 3) == 5\nassert add(-1, 1) == 0"),
    ("last", "lists.py", "def last(items):\n    return {}\n", "items[0]", "items[-1]", "from lists import last\nassert last([1, 2, 3]) == 3\nassert last('ab') == 'b'"),
    ("even", "numbers_.py", "def even(n):\n    return {}\n", "n % 2 == 1", "n % 2 == 0", "from numbers_ import even\nassert even(4)\nassert not even(3)"),
    ("shout", "words.py", "def shout(text):\n    return {}\n", "text.lower()", "text.upper()", "from words import shout\nassert shout('hi') == 'HI'\nassert shout('') == ''"),
    ("mean", "stats.py", "def mean(values):\n    return {}\n", "sum(values)", "sum(values) / len(values)", "from stats import mean\nassert mean([2, 4]) == 3\nassert mean([1]) == 1"),
    ("clip", "ranges.py", "def clip(x, low, high):\n    return {}\n", "min(low, max(x, high))", "max(low, min(x, high))", "from ranges import clip\nassert clip(5, 0, 3) == 3\nassert clip(-1, 0, 3) == 0"),
    ("flip", "order.py", "def flip(items):\n    return {}\n", "items", "items[::-1]", "from order import flip\nassert flip([1, 2]) == [2, 1]\nassert flip('abc') == 'cba'"),
    ("count", "search.py", "def count(text, letter):\n    return {}\n", "text.find(letter)", "text.count(letter)", "from search import count\nassert count('banana', 'a') == 3\nassert count('b', 'a') == 0"),
    ("square", "powers.py", "def square(x):\n    return {}\n", "x * 2", "x ** 2", "from powers import square\nassert square(3) == 9\nassert square(0) == 0"),
    ("empty", "checks.py", "def empty(items):\n    return {}\n", "len(items) > 0", "len(items) == 0", "from checks import empty\nassert empty([])\nassert not empty([1])"),
    ("join", "text.py", "def join(words):\n    return {}\n", "''.join(words)", "' '.join(words)", "from text import join\nassert join(['a', 'b']) == 'a b'\nassert join([]) == ''"),
    ("absolute", "signs.py", "def absolute(x):\n    return {}\n", "-x", "x if x >= 0 else -x", "from signs import absolute\nassert absolute(2) == 2\nassert absolute(-2) == 2"),
]  # fmt: skip


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows: a prompt, the repository's files at a base commit, the true ones, and the hidden tests."""
    dice, found = random.Random(seed), []
    for _ in range(count):
        name, file, code, wrong, right, tests = dice.choice(TASKS)
        others = dice.sample([task[1] for task in TASKS if task[1] != file], 2)
        files = {file: code.format(wrong), **dict.fromkeys(others, "# nothing is wrong here\n")}
        text = f"The test of {file} fails . Files : {' '.join(sorted(files))}"
        found.append({
            "prompt": [{"role": "user", "content": text}], "task": name, "file": file, "files": json.dumps(files),
            "base_commit": hashlib.sha1(json.dumps(files).encode()).hexdigest(),  # names the state of the files
            "true": code.format(right), "tests": tests,
        })  # fmt: skip
    return found


# ---- The sandbox

LIMITS = """\
import resource, sys
for name, most in {"CPU": 5, "AS": 1 << 30, "FSIZE": 1 << 20, "NPROC": 64}.items():
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
sys.path.insert(0, ".")
"""
SECONDS = 10  # for a program
NO_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]


class Sandbox:
    """A folder with files, and programs that run in it: processes of their own with limits of CPU, memory, time and file size.

    They have no network and see no other processes, by namespaces of Linux. Raises: OSError where the kernel refuses that,
    unless `allow_network`. They may read and write what the user may: put a container around the trainer where that matters.
    """

    def __init__(self, files: dict[str, str], *, allow_network: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="repair-"))
        self.prefix = [] if allow_network else NO_NETWORK
        refused = None if allow_network else why_refused()
        if refused:
            raise OSError(f"This system makes no network namespaces ({refused}). Set allow_network=True.")
        for name, text in files.items():
            self.write(name, text)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, name: str) -> Path:
        """A file in the folder. Raises: ValueError for one outside of it."""
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise ValueError(f"{name} is outside of the repository")
        return path

    def read(self, name: str) -> str:
        """The text of a file."""
        return self.path(name).read_text()[:10_000]

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_text(text)

    def run(self, program: str) -> tuple[int, str]:
        """The status and the end of the output of a Python program."""
        line = [*self.prefix, sys.executable, "-IB", "-c", LIMITS + program]
        with tempfile.TemporaryFile() as out:  # of limited size, as the program's other files
            process = subprocess.Popen(
                line, cwd=self.folder, env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                return -1, "it took too long"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it started, too
                process.wait()
            out.seek(0)
            return status, out.read()[-1000:].decode(errors="replace")

    def passes(self, tests: str) -> tuple[bool, str]:
        """Whether tests run to their end, which a program that exits with status 0 does not, and what they print."""
        word = secrets.token_hex()
        status, text = self.run(f"{tests}\nprint({word!r})")
        return status == 0 and word in text, text or f"status {status}"


@functools.cache
def why_refused() -> str | None:
    """Why the kernel makes no namespace without a network; None if it does."""
    try:
        found = subprocess.run([*NO_NETWORK, "true"], capture_output=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return found.stderr.decode().strip() or "unshare failed" if found.returncode else None


# ---- The agent


def read(file: str) -> str:
    """Reads a file of the repository.

    Args:
        file: Its name.
    """
    return file


def write(file: str, text: str) -> str:
    """Writes a file of the repository.

    Args:
        file: Its name.
        text: Its new content.
    """
    return file + text


def run_tests() -> str:
    """Runs the tests."""
    return ""


TOOLS = [get_json_schema(each) for each in (read, write, run_tests)]
CLIENT = openai.AsyncOpenAI(base_url="http://localhost", api_key="none")  # its connections are shared


def answer(sandbox: Sandbox, name: str, given: dict[str, Any], tests: str) -> str:
    """What a tool answers."""
    try:
        if name == "read":
            return sandbox.read(given["file"])
        if name == "write":
            sandbox.write(given["file"], given["text"])
            return "written"
        passed, text = sandbox.passes(tests)
        return "passed" if passed else text
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"Error: {type(error).__name__}"


def share_passed(sandbox: Sandbox, tests: str) -> float:
    """The share of assertions that hold."""
    first, *asserts = tests.splitlines()
    return sum(sandbox.passes(f"{first}\n{each}")[0] for each in asserts) / len(asserts)


def similarity(sandbox: Sandbox, row: dict[str, Any]) -> float:
    """How similar the file is to the repaired one, from 0 to 1."""
    return difflib.SequenceMatcher(None, sandbox.read(row["file"]), row["true"]).ratio()


class Repair:
    """The agent: it lets the policy call tools until it stops, at most `turns` times.

    `reward`: "tests" for the share of hidden tests that pass, "patch" for the similarity to the true file, "first" for whether the
    first call reads the file that is wrong.
    """

    def __init__(self, reward: str, *, turns: int, allow_network: bool) -> None:
        self.reward, self.turns, self.allow_network = reward, turns, allow_network

    async def __call__(self, row: dict[str, Any], base_url: str, api_key: str) -> float:
        client, messages = CLIENT.with_options(base_url=base_url, api_key=api_key), list(row["prompt"])
        calls: list[tuple[str, dict[str, Any]]] = []
        with Sandbox(json.loads(row["files"]), allow_network=self.allow_network) as sandbox:
            for _ in range(self.turns):
                found = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
                message = found.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    calls.append((call.function.name, json.loads(call.function.arguments)))
                    text = await asyncio.to_thread(answer, sandbox, *calls[-1], row["tests"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
                if not message.tool_calls:
                    break
            if self.reward == "first":
                return float(calls[:1] == [("read", {"file": row["file"]})])
            if self.reward == "patch":
                return similarity(sandbox, row)
            return await asyncio.to_thread(share_passed, sandbox, row["tests"])


# ---- A policy of random weights that has seen some conversations

FILES = sorted(task[1] for task in TASKS)
MARKS = ("<tool_call>", "</tool_call>", "<user>", "<assistant>", "<tool>")
WORDS = ("The", "test", "of", "fails", ".", "Files", ":", '{"name":', '"read",', '"run_tests",', '"arguments":', "{", '{"file":', "}}", "{}}", "done")  # fmt: skip
TEMPLATE = """\
{%- for message in messages %}<{{ message.role }}> {{ message.content }} {% for call in message.tool_calls or [] -%}
<tool_call> {"name": "{{ call.function.name }}", "arguments": {
{%- for name, value in call.function.arguments.items() -%}
"{{ name }}": {{ value | tojson }} {% endfor %}}} </tool_call> {% endfor -%}
<end> {% endfor -%}
{%- if tools %}{% endif %}{%- if add_generation_prompt %}<assistant> {% endif -%}
"""
SMALL = {
    "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False,
}  # fmt: skip
SFT = {
    "per_device_train_batch_size": 64, "max_steps": 300, "learning_rate": 3e-3, "assistant_only_loss": True, "logging_strategy": "no",
}  # fmt: skip
GRPO = {
    "per_device_train_batch_size": 64, "per_device_eval_batch_size": 64, "num_generations": 8, "num_generations_eval": 1,
    "max_completion_length": 12, "learning_rate": 5e-4, "warmup_steps": 10, "logging_steps": 10,
}  # fmt: skip


def shown(row: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """A conversation to imitate: four in ten first read the right file, the others another one, or run the tests."""
    files = json.loads(row["files"])
    chance = dice.random()
    file = row["file"] if chance < 0.4 else dice.choice(sorted(files))
    call = {"name": "read", "arguments": {"file": file}}
    if chance > 0.8:
        call = {"name": "run_tests", "arguments": {}}
    messages = [
        *row["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "done"},
    ]
    return {"messages": messages, "tools": json.dumps(TOOLS)}


def small_parts(folder: Path, seed: int) -> tuple[Any, Any]:
    """A model that has seen the tools used, and its tokenizer."""
    tokenizer = tiny.word_tokenizer([*WORDS, *FILES, *(f'"{file}"' for file in FILES)], MARKS)
    tokenizer.chat_template = TEMPLATE
    model, dice = small_llama(tokenizer, seed=seed, layers=2, width=128), random.Random(seed)
    data = Dataset.from_list([shown(row, dice) for row in rows(4096, seed)], on_mixed_types="use_json")
    config = SFTConfig(str(folder), seed=seed, **SFT, **SMALL)
    SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer).train()
    return model, tokenizer


def main() -> GRPOTrainer:
    """Train, and print the reward before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="Train a small model of random weights.")
    parser.add_argument("--model", help="The model to train.")
    parser.add_argument("--reward", choices=("tests", "patch", "first"), help="Default: tests, first with --tiny.")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="runs/repair")
    parser.add_argument("--allow_network", action="store_true", help="Programs of the policy have a network.")
    append = tiny.figures(parser)
    given = parser.parse_args()
    if given.tiny == (given.model is not None):
        parser.error("give either --tiny or --model")
    model, tokenizer, settings = (
        given.model,
        None,
        {"max_completion_length": 1024, "num_generations": 8, "num_generations_eval": 1},
    )
    if given.tiny:
        model, tokenizer = small_parts(Path(given.output_dir) / "tiny", given.seed)
        settings = {**GRPO, **SMALL}
    args = GRPOConfig(
        given.output_dir, max_steps=given.max_steps, seed=given.seed, agent_concurrency=16, agent_deadline=120, **settings
    )  # fmt: skip
    agent = Repair(
        given.reward or ("first" if given.tiny else "tests"), turns=2 if given.tiny else 10, allow_network=given.allow_network
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, None, args, Dataset.from_list(rows(512, given.seed)), Dataset.from_list(rows(64, given.seed + 1)),
        processing_class=tokenizer, agent=agent,
    )  # fmt: skip
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    print(f"reward ({agent.reward}): {before:.3f} -> {after:.3f} over {trainer.state.global_step} steps")
    append({"seed": given.seed, f"reward ({agent.reward})": f"{before:.3f} → {after:.3f}"})
    trainer.save_model(given.output_dir)
    return trainer


if __name__ == "__main__":
    trainer = main()
