"""Agents over the endpoint compared with direct engine calls, and what HTTP costs: `python benchmarks/agents.py --help`.

`engine`: sessions through HTTP and the same requests by `generate`, turn by turn. `http`: requests per second with an engine that
answers at once, server and clients on a core each. `tools`: agents with a slow tool, compared with the slowest session alone.
`reuse`: a session whose turns keep their keys and values. `growth`: distinct prompts, one after another. The clients are a process of their own. With `--fuzz` bad requests are sent.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.agent_clients import session
from benchmarks.agent_fuzz import fuzz
from benchmarks.data import BPE_SIZE, load_corpus, word_tokenizer
from benchmarks.tables import table_row, write_figures
from benchmarks.variants import SHAPES, build_model
from datasets import Dataset
from transformers import PrinterCallback

from trl import GRPOConfig, GRPOTrainer
from trl.data.training_templates import QWEN3_TRAINING_TEMPLATE
from trl.experimental.agents import Endpoint
from trl.generation.engine import Generated, Sampling
from trl.generation.live import Request
from trl.generation.transformers.engine import TransformersEngine

CASES = ("engine", "http", "tools", "reuse", "growth")
CLIENTS = Path(__file__).with_name("agent_clients.py")
COLUMNS = ["case", "sessions", "turns", "figure", "value", "aim"]
Result = dict[str, Any]


def parse(given: Sequence[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--size", choices=list(SHAPES), default="5m", help="decoder body of the policy")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="of a completion")
    parser.add_argument("--delay", type=float, nargs=2, default=(0.2, 2.0), help="seconds of the slow tool")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best ratio counts")
    parser.add_argument("--tiny", action="store_true", help="few sessions and a tiny model, for the tests")
    parser.add_argument("--fuzz", type=int, metavar="N", help="only send N bad requests to a tiny model")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    args = parser.parse_args(given)
    if args.tiny:
        args.size, args.sessions, args.turns, args.tokens, args.rounds = "tiny", 4, 2, 4, 1
        args.delay = (0.01, 0.05)
    return args


def main(given: Sequence[str] | None = None) -> list[Result]:
    args = parse(given)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, fp32, {args.size}, load {os.getloadavg()[0]:.1f}\n")
    print(table_row(COLUMNS), table_row(["---"] * len(COLUMNS)), sep="\n")
    tokenizer = word_tokenizer() if args.tiny else load_corpus(None, max_length=512, rows=1).tokenizer
    tokenizer.chat_template = QWEN3_TRAINING_TEMPLATE
    bench = Bench(args, tokenizer, [f"What is {number} + 3?" for number in range(args.sessions)])
    cases = args.cases if args.fuzz is None else ["fuzz"]
    found = [result for case in cases for result in getattr(bench, case)()]
    write_figures(found, args.out)
    return found


class Instant:
    """An engine that answers at once."""

    def __init__(self, tokens: int) -> None:
        self.answer = Generated([5] * tokens, torch.zeros(tokens), None, "length")
        self.waiting: list[int] = []
        self.so_far = 0

    @contextmanager
    def live(self) -> Iterator[Instant]:
        yield self

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Request) -> int:
        self.so_far += 1
        self.waiting.append(self.so_far)
        return self.so_far

    def cancel(self, request: int) -> None:
        self.waiting = [number for number in self.waiting if number != request]

    def step(self) -> dict[int, Generated]:
        done, self.waiting = self.waiting, []
        return dict.fromkeys(done, self.answer)


class Bench:
    """The cases; each yields rows of the table."""

    def __init__(self, args: Namespace, tokenizer: Any, questions: list[str]) -> None:
        self.args, self.tokenizer, self.questions = args, tokenizer, questions
        self.sampling = Sampling(max_new_tokens=args.tokens, seed=0, stop_token_ids=())

    def engine(self) -> Iterator[Result]:
        """Tokens per second over HTTP, as a share of those of direct calls."""
        engine, best, best_cpu = self._own(), 0.0, 0.0
        for _ in range(self.args.rounds):
            with self._serving(engine) as endpoint:
                sessions = [endpoint.session() for _ in range(self.args.sessions)]
                served = self._play(endpoint, sessions)
            waves = [[session.turns[turn] for session in sessions] for turn in range(self.args.turns)]
            started = time.process_time()
            direct = timed(lambda waves=waves: [self._direct(engine, wave) for wave in waves])
            best_cpu = max(best_cpu, (time.process_time() - started) / served["cpu"])
            best = max(best, direct / served["seconds"])
        yield self._row("engine", "throughput / direct calls", best, ">= 0.9")
        yield self._row("engine", "tokens per CPU second / direct calls", best_cpu, "")

    def _direct(self, engine: TransformersEngine, wave: list[Any]) -> None:
        found = engine.generate([turn.context for turn in wave], self.sampling)
        if [len(one.ids) for one in found] != [len(turn.generated.ids) for turn in wave]:
            raise ValueError("the two sides do not do the same work.")

    def http(self) -> Iterator[Result]:
        """Requests per second of the server alone."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1])
        try:
            best = 0.0
            for _ in range(self.args.rounds):
                with self._serving(Instant(self.args.tokens)) as endpoint:
                    sessions = [endpoint.session() for _ in range(self.args.sessions)]
                    seconds = self._play(endpoint, sessions, core=cores[-1])["seconds"]
                best = max(best, self.args.sessions * self.args.turns / seconds)
        finally:
            os.sched_setaffinity(0, cores)
        yield self._row("http", "requests/s on one core", best, ">= 200")

    def tools(self) -> Iterator[Result]:
        """Seconds of a batch with a slow tool over those of its slowest session alone; the engine's idle share."""
        engine, tokens = self._own(), min(self.args.tokens, 16)
        with self._serving(engine) as endpoint:
            sessions = [endpoint.session() for _ in range(self.args.sessions)]
            batch = self._play(endpoint, sessions, delay=self.args.delay, tokens=tokens)
            broker = endpoint.broker
            idle = broker.idle_s / (broker.idle_s + broker.busy_s)
            slowest = max(range(len(sessions)), key=batch["each"].__getitem__)
            again = [endpoint.session(stream=number) for number in range(len(sessions))]
            alone = self._play(endpoint, again, delay=self.args.delay, tokens=tokens, numbers=[slowest])
        yield self._row("tools", "batch / slowest session alone", batch["seconds"] / alone["seconds"], "<= 1.3")
        yield self._row("tools", "idle share of the engine", idle, "")
        yield from self._trained(engine.model, tokens)

    def _trained(self, model: Any, tokens: int) -> Iterator[Result]:
        """Shares of two steps of GRPO in which the trainer and the engine wait for agents."""
        settings = self._settings(delay=self.args.delay, tokens=tokens)
        brokers, waited, run = [], [0.0], Endpoint.run

        async def agent(row: Any, base_url: str, api_key: str) -> float:
            port = int(base_url.split(":")[2].split("/")[0])
            return await session(settings | {"port": port}, api_key, row["number"]) % 1

        def running(endpoint: Endpoint, until: Callable[[], bool]) -> None:
            brokers.append(endpoint.broker)
            waited[0] += timed(lambda: run(endpoint, until))

        rows = [
            {"prompt": [{"role": "user", "content": question}], "number": number}
            for number, question in enumerate(self.questions)
        ]
        samples = 2 if self.args.tiny else 8
        with TemporaryDirectory() as folder:
            args = GRPOConfig(
                folder, max_steps=2, num_generations=samples, max_completion_length=tokens, report_to="none",
                per_device_train_batch_size=self.args.sessions, disable_tqdm=True, save_strategy="no", use_cpu=True,
            )  # fmt: skip
            data = Dataset.from_list(rows)
            trainer = GRPOTrainer(model, None, args, data, processing_class=self.tokenizer, agent=agent)
            trainer.remove_callback(PrinterCallback)
            Endpoint.run = running  # type: ignore[method-assign]
            try:
                seconds = timed(trainer.train)
            finally:
                Endpoint.run = run  # type: ignore[method-assign]
        busy = sum(broker.busy_s for broker in brokers)
        yield self._row("tools", "two steps of GRPO: idle share of the engine", 1 - busy / seconds, "")
        yield self._row("tools", "two steps of GRPO: idle share of the trainer", waited[0] / seconds, "")

    def reuse(self) -> Iterator[Result]:
        """CPU seconds of a session without reuse of keys and values over those with it, by the lengths of the tool's answers."""
        turns = 2 if self.args.tiny else 10
        for words in (20, 140):  # in a context length of 4,096
            seconds = []
            for memory in (0, None):
                engine = self._own(reuse_memory=memory)
                best = math.inf
                for _ in range(self.args.rounds):
                    with self._serving(engine) as endpoint:
                        reply = " ".join(["The tool says 3."] * (words // 4))
                        played = self._play(endpoint, [endpoint.session(stream=0)], turns=turns, reply=reply)
                    best = min(best, played["cpu"])
                seconds.append(best)
            yield self._row("reuse", f"speed-up, answers of {words} words", seconds[0] / seconds[1], "", 1, turns)

    def growth(self) -> Iterator[Result]:
        """CPU seconds of a request in the sixth thousand of distinct prompts over those of one in the second.

        Two processes measure them in turn, fifty requests at a time, so that what else runs on the machine slows both alike. The
        ratio is the median of the turns.
        """
        part, turns = (2, 2) if self.args.tiny else (50, 20)
        self.questions = [f"What is {number} + {number % 7}?" for number in range(120 * part)]
        cases: tuple[tuple[str, Result, bool], ...] = (
            ("chats", {}, False),
            ("texts", {}, True),
            ("chats that nothing keeps", {"keeps": False}, False),
        )
        for name, options, is_text in cases:
            with self._measuring(options, is_text) as late, self._measuring(options, is_text) as early:
                late(0, 100 * part)
                early(0, 20 * part)
                starts = range(0, turns * part, part)
                costs = [(late(100 * part + start, part), early(20 * part + start, part)) for start in starts]
            columns = [1e3 * median(column) for column in zip(*costs, strict=True)]
            print(f"{name}, ms per request: {columns[0]:.2f} in the sixth thousand, {columns[1]:.2f} in the second")
            ratio = median(sixth / second for sixth, second in costs)
            yield self._row("growth", f"{name}: sixth / second thousand", ratio, "<= 1.1", 1, 1)

    @contextmanager
    def _measuring(self, options: Result, is_text: bool) -> Iterator[Callable[[int, int], float]]:
        """A function that gives the CPU seconds per request of so many prompts from a number on, in a process of their own."""
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, "trl.trainer.base_trainer"])  # imported once for all cases
        here, there = context.Pipe()
        server = context.Process(target=self._measure, args=(there, options, is_text))
        server.start()
        there.close()

        def seconds(first: int, count: int) -> float:
            here.send(range(first, first + count))
            return here.recv() / count

        try:
            yield seconds
        finally:
            here.send(None)
            server.join()

    def _measure(self, pipe: Connection, options: Result, is_text: bool) -> None:
        """Send the CPU seconds of the prompts whose numbers come through a pipe, until `None` comes."""
        torch.set_num_threads(1)
        settings: Result = {"turns": 1, "tokens": 2, "at_once": 1, "is_text": is_text}
        with self._serving(self._own()) as endpoint:
            sessions = [endpoint.session(**options)]
            for numbers in iter(pipe.recv, None):
                pipe.send(self._play(endpoint, sessions, numbers=list(numbers), **settings)["cpu"])

    def fuzz(self) -> Iterator[Result]:
        """Errors of the server, and growth of memory after a tenth of the requests."""
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        counts, faults, levels = Counter[str](), 0, []
        model = build_model("tiny", BPE_SIZE).eval()
        engine = TransformersEngine(model, tokenizer=self.tokenizer, reuse_memory=1 << 20)
        with Endpoint(engine, self.tokenizer, agent_sampling="agent") as endpoint:
            session = endpoint.session(keeps=False)
            for part in range(10):
                found, wrong = fuzz(endpoint.port, session.api_key, self.args.fuzz // 10, seed=part)
                counts, faults = counts + found, faults + len(wrong)
                gc.collect()
                levels.append(round(memory()))
            if endpoint.broker.failure is not None:
                raise endpoint.broker.failure
        print(dict(counts), "MB after each tenth:", levels)
        yield self._row("fuzz", f"errors of the server in {self.args.fuzz} requests", faults, "0", 1, 1)
        yield self._row("fuzz", "growth of memory in the second half, MB", levels[-1] - levels[4], "", 1, 1)

    # ---- parts

    def _own(self, **options: Any) -> TransformersEngine:
        model = build_model(self.args.size, BPE_SIZE).eval()
        return TransformersEngine(model, tokenizer=self.tokenizer, **options)

    @contextmanager
    def _serving(self, engine: Any) -> Iterator[Endpoint]:
        with Endpoint(engine, self.tokenizer, sampling=self.sampling) as endpoint:
            yield endpoint

    def _settings(self, **given: Any) -> Result:
        """The settings of clients."""
        return {
            "questions": self.questions, "turns": self.args.turns, "tokens": self.args.tokens, "delay": None, "core": None,
            "at_once": 1 << 20, "is_text": False, "reply": "The tool says 3. Go on.",
        } | given  # fmt: skip

    def _play(self, endpoint: Endpoint, sessions: Sequence[Any], **given: Any) -> Result:
        """What the process of the clients measured."""
        settings = self._settings(port=endpoint.port, numbers=list(range(len(sessions)))) | given
        settings["keys"] = [session.api_key for session in sessions]
        command, started = [sys.executable, str(CLIENTS)], time.process_time()
        found = subprocess.run(command, input=json.dumps(settings), text=True, check=True, stdout=subprocess.PIPE)
        return json.loads(found.stdout) | {"cpu": time.process_time() - started}

    def _row(
        self,
        case: str,
        figure: str,
        value: float,
        aim: str,
        sessions: int | None = None,
        turns: int | None = None,
    ) -> Result:
        counts = [sessions or self.args.sessions, turns or self.args.turns]
        cells = [case, *counts, figure, f"{value:.2f}", aim]
        print(table_row(cells), flush=True)
        return {"case": case, "figure": figure, "value": value}


def memory() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def timed(function: Callable[[], Any]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
