"""How our step of GRPO or online DPO compares with a hand-written one, per completion token: `python benchmarks/group.py --help`."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not any("cuda" in argument for argument in sys.argv):
    os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets
import torch
from benchmarks.data import BPE_SIZE, load_corpus
from benchmarks.group_loops import LOOPS, PHASES, Phases, Spent, Work, make_trainer, prompts_of
from benchmarks.group_sharing import time_sharing
from benchmarks.measure import free_memory
from benchmarks.memory import ROOT, Level
from benchmarks.tables import Result, table_row, write_figures
from benchmarks.variants import SHAPES, build_model
from transformers import TrainerCallback

MEAN_LENGTH = 97  # of GSM8K's answers under the benchmark's tokenizer
LEGEND = """\
ours, bare: CPU seconds per 1,000 completion tokens (on a GPU: seconds), median of the steps; generate + score + update
score: rewards and the reference's log-probs
growth: peak memory of a step over the level with policy, reference and optimiser state"""
COLUMNS = [
    "case", "model", "vocabulary", "prompt tokens", "completion tokens", "ours", "bare", "/ bare", "growth, MB", "/ bare",
]  # fmt: skip
RATIOS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of some questions; completions end early at a stop token, or all at the greatest length."""

    questions: int
    ends_early: bool

    @property
    def name(self) -> str:
        ends = "ends early" if self.ends_early else "full length"
        return f"{'one question' if self.questions == 1 else f'{self.questions} questions'}, {ends}"

    def work(self, args: Namespace, vocabulary: int) -> Work:
        steps = args.steps + 1
        corpus = load_corpus(args.data, max_length=512, rows=steps * args.prompts * self.questions)
        rows = prompts_of(corpus, questions=self.questions, count=steps * args.prompts)
        stops = list(range(1, 1 + round(vocabulary / MEAN_LENGTH))) if self.ends_early else []
        new_tokens = (16 if args.quick else 256) if self.ends_early else (16 if args.quick else 128)
        micro = args.group * args.micro_groups
        where = {"device": args.device, "method": args.method}
        return Work(rows, new_tokens, stops, args.prompts, args.group, micro, **where)


CASES = {
    "short": Case(1, True),
    "short-full": Case(1, False),
    "long": Case(5, True),
    "long-full": Case(5, False),
}


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=list(LOOPS), default="grpo")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=["short", "long"])
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), help="decoder bodies; CPU: 5m, GPU: 500m")
    parser.add_argument("--vocab", nargs="+", type=int, help=f"vocabularies; CPU: {BPE_SIZE}, GPU: 151936")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side, after one")
    parser.add_argument("--prompts", type=int, help="prompts of a step; grpo: 4, online-dpo: 16")
    parser.add_argument("--group", type=int, help="completions of each prompt; grpo: 8, online-dpo: 2")
    parser.add_argument("--micro_groups", type=int, help="groups of a micro-batch; grpo: 1, online-dpo: 4")
    parser.add_argument("--data", type=Path, help="jsonl with question/answer; default: GSM8K")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no_memory", action="store_true", help="leave out the growth of memory")
    parser.add_argument("--no_sharing", action="store_true", help="leave out the table of shared prompts")
    parser.add_argument("--quick", action="store_true", help="short completions, one step")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    parser.add_argument("--growth_of", choices=["ours", "bare"], help="internal: measure one side's memory")
    args = parser.parse_args()
    sizes = (4, 8, 1) if args.method == "grpo" else (16, 2, 4)
    for name, default in zip(("prompts", "group", "micro_groups"), sizes, strict=True):
        setattr(args, name, getattr(args, name) or default)
    if args.quick:
        args.steps = 1
    args.sizes = args.sizes or (["5m"] if args.device == "cpu" else ["500m"])
    args.vocab = args.vocab or ([BPE_SIZE] if args.device == "cpu" else [151_936])
    return args


def main() -> None:
    args = parse()
    logging.getLogger("trl").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    if args.device == "cpu":
        torch.set_num_threads(1)
    if args.growth_of:
        (case,), (size,), (vocabulary,) = args.cases, args.sizes, args.vocab
        print(json.dumps(growth(args, CASES[case], size, vocabulary)))
        return
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, fp32, 1 thread"
    print(
        f"{args.method}, torch {torch.__version__}, {where}, {args.prompts} prompts, {args.group} completions of each\n"
    )
    print(LEGEND)
    print(table_row(COLUMNS), table_row(["---"] * len(COLUMNS)), sep="\n")
    results = [
        measure(args, case, size, vocabulary) for vocabulary in args.vocab for size in args.sizes for case in args.cases
    ]
    if not args.no_sharing and args.method == "grpo":
        results += sharing(args)
    write_figures(results, args.out)


def build(args: Namespace, size: str, vocabulary: int) -> Any:
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    return build_model(size, vocabulary, dtype=dtype, device=args.device)


def measure(args: Namespace, name: str, size: str, vocabulary: int) -> Result:
    """One case: steps of both sides in turn in this process, on the same prompts; memory in a process for each."""
    work, model = CASES[name].work(args, vocabulary), build(args, size, vocabulary)
    spent = run_in_turn(model, work, steps=args.steps)
    del model
    free_memory()
    asked = ["--cases", name, "--sizes", size, "--vocab", str(vocabulary)]
    grown = {} if args.no_memory else {side: growth_in_subprocess(args, side, asked) for side in spent}
    ratio = median(
        mine.total / mine.tokens / (other.total / other.tokens)
        for mine, other in zip(spent["ours"], spent["bare"], strict=True)
    )
    lengths = f"{min(map(len, work.rows))}-{max(map(len, work.rows))}"
    cells = [
        *(CASES[name].name, size, vocabulary, lengths, round(median(one.tokens for one in spent["ours"]))),
        *(_split(spent[side]) for side in spent),
        f"{ratio:.3f}",
        *([f"{grown['ours'] / 1e6:.0f}", f"{grown['ours'] / grown['bare']:.2f}"] if grown else ["-", "-"]),
    ]
    print(table_row(cells), flush=True)
    seconds = {side: [{**one.seconds, "tokens": one.tokens} for one in own] for side, own in spent.items()}
    case: Result = {"case": name, "size": size, "vocabulary": vocabulary, "ratio": ratio}
    return {**case, "seconds": seconds, "growth_bytes": grown}


def _split(steps: list[Spent]) -> str:
    parts = {phase: 1000 * median(step.seconds[phase] / step.tokens for step in steps) for phase in PHASES}
    total = 1000 * median(step.total / step.tokens for step in steps)
    return f"{total:.2f} ({' + '.join(f'{parts[phase]:.2f}' for phase in PHASES)})"


def run_in_turn(model: Any, work: Work, *, steps: int) -> dict[str, list[Spent]]:
    """`steps` steps of our trainer's `train()` and of the loop in turn, after one of each that does not count."""
    loop = LOOPS[work.method](model, work)
    tokenizer = load_corpus(None, max_length=512, rows=8).tokenizer
    trainer = make_trainer(model, work, tokenizer, steps=steps + 1)
    phases = Phases(trainer, work.device)
    found: dict[str, list[Spent]] = {"ours": [], "bare": []}

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args: Any, **_: Any) -> None:
            phases.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ours = phases.stop(len(trainer._rollout_batch.completions.values))
            bare = loop.step(work.prompts_of(state.global_step - 1))
            if state.global_step > 1:
                found["ours"].append(ours)
                found["bare"].append(bare)
            phases.start()

    trainer.add_callback(TakeTurns())
    trainer.train()
    return found


def growth_in_subprocess(args: Namespace, side: str, asked: list[str]) -> int:
    command = [
        sys.executable, str(Path(__file__).resolve()), "--growth_of", side, *asked, "--method", args.method, "--prompts", str(args.prompts),
        "--group", str(args.group), "--micro_groups", str(args.micro_groups), "--device", args.device,
        *(["--data", str(args.data)] if args.data else []), *(["--quick"] if args.quick else []),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {side} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def growth(args: Namespace, case: Case, size: str, vocabulary: int) -> int:
    """Bytes by which the peak of a step exceeds the level after one before it, which fills the optimiser's state."""
    work, model, level = case.work(args, vocabulary), build(args, size, vocabulary), _level(args.device)
    if args.growth_of == "bare":
        loop = LOOPS[work.method](model, work)
        del model
        for step in range(2):
            loop.step(work.prompts_of(step))
            if step == 0:
                level.mark()
        return level.growth()
    tokenizer = load_corpus(None, max_length=512, rows=8).tokenizer
    trainer = make_trainer(model, work, tokenizer, steps=2)

    class Mark(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                level.mark()

    trainer.add_callback(Mark())
    trainer.train()
    return level.growth()


def _level(device: str) -> Any:
    return _DeviceLevel() if device == "cuda" else Level()


class _DeviceLevel:
    """The same of a GPU's memory."""

    def mark(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.bytes = torch.cuda.memory_allocated()

    def growth(self) -> int:
        return torch.cuda.max_memory_allocated() - self.bytes


def sharing(args: Namespace) -> list[Result]:
    """The table of our update with a shared prompt over the same without."""
    size, vocabulary = args.sizes[0], args.vocab[0]
    print(f"\nan update of {args.group} completions, prompt shared over prompt repeated (median; operations):")
    columns = ["prompt : completion", "model", "shared, s", "/ repeated", "operations"]
    print(table_row(columns), table_row(["---"] * len(columns)), sep="\n")
    results: list[Result] = []
    for ratio in RATIOS[:1] if args.quick else RATIOS:
        work = replace(Work([], 0, []), prompts=1, group=args.group, micro=args.group, device=args.device)
        found = time_sharing(ratio, build(args, size, vocabulary), work, steps=args.steps)
        cells = [f"{ratio} : 1", size, f"{median(found.seconds[True]):.3f}", f"{found.gain:.3f}"]
        print(table_row([*cells, f"{found.operations:.3f}"]), flush=True)
        results.append({"prefix_sharing": ratio, "gain": found.gain, "operations": found.operations})
    return results


if __name__ == "__main__":
    main()
