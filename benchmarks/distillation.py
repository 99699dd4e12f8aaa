"""How a step of GKD compares with the usual loop over both models' full logits: `python benchmarks/distillation.py --help`.

Data: padded rows, completions of the dataset. On-policy: completions of the student for GSM8K questions, by `model.generate` in
the loop. Every side runs in a process of its own, on the same weights and rows, in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.data import BPE_SIZE, Corpus, Row, load_corpus, word_tokenizer
from benchmarks.generation import MEAN_LENGTH, up_to_stop
from benchmarks.measure import on_one_quiet_thread, trainer_settings
from benchmarks.memory import ROOT, Level
from benchmarks.tables import Result, table_row, write_figures
from benchmarks.variants import IGNORED, Loop, Recipe, build_model
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from trl import GKDConfig, GKDTrainer

SIDES = ("ours", "plain")
CASES = ("data", "on-policy, ends early", "on-policy, full length")
BETA = 0.5
COLUMNS = ["case", "models", "vocabulary", "trained tokens", "ours, s", "plain, s", "/ plain", "ours, MB", "plain, MB", "/ plain"]  # fmt: skip


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--size", default="5m", help="decoder body of student and teacher")
    parser.add_argument("--vocab", type=int, default=152_000, help="vocabulary of the padded rows of the dataset")
    parser.add_argument("--tokens", type=int, default=1024, help="of a padded batch of the dataset; the plain loop takes 10 MB per token")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=16, help="of an on-policy step")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each side, after one")
    parser.add_argument("--quick", action="store_true", help="small vocabulary, one step")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    parser.add_argument("--side", choices=SIDES, help="internal: measure one side of one case")
    args = parser.parse_args()
    if args.quick:
        args.vocab, args.steps, args.prompts = BPE_SIZE, 1, 4
    return args


def main() -> None:
    args = parse()
    on_one_quiet_thread()
    if args.side:
        print(json.dumps(measure_side(args, args.cases[0], args.side)))
        return
    print(f"torch {torch.__version__}, fp32, 1 thread; CPU seconds per step, on-policy per 1,000 trained tokens; growth of memory\n")  # fmt: skip
    print(table_row(COLUMNS), table_row(["---"] * len(COLUMNS)), sep="\n")
    write_figures([measure(args, case) for case in args.cases], args.out)


def measure(args: Namespace, case: str) -> Result:
    """A case, each side in a process of its own."""
    found = {}
    for side in SIDES:
        command = [
            sys.executable,
            "-m",
            "benchmarks.distillation",
            *sys.argv[1:],
            "--cases",
            case,
            "--side",
            side,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"measuring {side} failed:\n{done.stderr[-3000:]}")
        found[side] = json.loads(done.stdout.splitlines()[-1])
    ours, plain = (found[side] for side in SIDES)
    if case == "data" and abs(ours["loss"] - plain["loss"]) > 1e-4:
        raise ValueError(f"the losses of the first step must agree to 1e-4, got {ours['loss']} and {plain['loss']}.")
    scale = 1 if case == "data" else 1000
    cost = [scale * side["seconds"] / (1 if case == "data" else side["tokens"]) for side in (ours, plain)]
    grown = [side["growth"] / 1e6 for side in (ours, plain)]
    cells = [case, args.size, vocabulary_of(args, case), plain["tokens"], *(f"{x:.2f}" for x in cost), f"{cost[0] / cost[1]:.3f}", *(f"{x:.0f}" for x in grown), f"{grown[0] / grown[1]:.3f}"]  # fmt: skip
    print(table_row(cells), flush=True)
    return {"case": case, **found}


def vocabulary_of(args: Namespace, case: str) -> int:
    return args.vocab if case == "data" else BPE_SIZE


def padded_rows(tokens: int) -> list[Row]:
    """Rows of a batch of `tokens` with padding: 60 % are real, half of them a prompt."""
    longest, generator = 256, torch.Generator().manual_seed(0)
    rows = []
    for number in range(tokens // longest):
        length = round(longest * (1 - 0.8 * number / max(tokens // longest - 1, 1)))
        ids = torch.randint(3, 4000, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "completion_mask": [0] * (length // 2) + [1] * (length - length // 2)})
    return rows


def corpus_of(args: Namespace, case: str) -> Corpus:
    if case != "data":
        corpus = load_corpus(None, max_length=512, rows=args.prompts * (args.steps + 1))
        return Corpus(corpus.rows, corpus.tokenizer, corpus.source)
    return Corpus(padded_rows(args.tokens) * (args.steps + 1), word_tokenizer(), "made-up rows")


def models_of(args: Namespace, case: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Student and teacher, whose weights differ by a tenth."""
    student, teacher = (build_model(args.size, vocabulary_of(args, case)) for _ in range(2))
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    stops = round(BPE_SIZE / MEAN_LENGTH) if case == "on-policy, ends early" else 0
    student.generation_config.eos_token_id = list(range(2, 2 + stops)) or None
    return student, teacher.eval()


def measure_side(args: Namespace, case: str, side: str) -> dict[str, float]:
    """CPU seconds of all steps after the first, growth of memory over the level after it, and the first loss."""
    corpus, (student, teacher), level = corpus_of(args, case), models_of(args, case), Level()
    rows = args.prompts if case != "data" else len(corpus.rows) // (args.steps + 1)
    recipe = Recipe(steps=args.steps + 1, batch_size=rows)
    new_tokens = 0 if case == "data" else 16 if args.quick else 256 if "early" in case else 128
    watch = Watch(level)
    if side == "ours":
        settings = trainer_settings(recipe, sequential=True) | {"logging_steps": 1}
        config = GKDConfig(**settings, lmbda=float(new_tokens > 0), max_new_tokens=new_tokens or 1, temperature=1.0, beta=BETA)  # fmt: skip
        trainer: Any = GKDTrainer(student, teacher, config, train_dataset=Dataset.from_list(corpus.rows), processing_class=corpus.tokenizer)  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(watch)
        draw = trainer.get_batch_samples

        def counted(*given: Any) -> Any:
            batches, count = draw(*given)
            watch.tokens.append(int(count if count is not None else 0))
            return batches, count

        trainer.get_batch_samples = counted
        trainer.train()
        loss = trainer.state.log_history[0]["loss"]
    else:
        loop, losses = PlainGKD(student, recipe, teacher, new_tokens), []
        del student
        watch.begin()
        for step in range(recipe.steps):
            batch = corpus.rows[step * rows : (step + 1) * rows]
            batch = loop.completed(batch) if new_tokens else batch
            watch.tokens.append(sum(sum(row["completion_mask"]) for row in batch))
            losses.append(loop.step(batch).item())
            watch.end_step()
        loss = losses[0]
    return {"seconds": sum(watch.seconds[1:]) / args.steps, "growth": level.growth(), "tokens": sum(watch.tokens[1 : args.steps + 1]) / args.steps, "loss": loss}  # fmt: skip


class Watch(TrainerCallback):
    """CPU seconds and trained tokens of each step; marks the level of memory after the first."""

    def __init__(self, level: Level) -> None:
        self.level, self.seconds, self.tokens = level, [], []

    def begin(self) -> None:
        self.started = time.process_time()

    def end_step(self) -> None:
        self.seconds.append(time.process_time() - self.started)
        if len(self.seconds) == 1:
            self.level.mark()
        self.begin()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end_step()


class PlainGKD(Loop):
    """Padded rows, all logits of both models, the divergence of all positions, then a mask."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, teacher: PreTrainedModel, new_tokens: int) -> None:
        super().__init__(model, recipe)
        self.teacher, self.new_tokens = teacher, new_tokens

    @torch.no_grad()
    def completed(self, rows: Sequence[Row]) -> list[Row]:
        """The prompts of the rows with completions by `model.generate`."""
        prompts = [torch.tensor(row["input_ids"][: row["completion_mask"].index(1)]) for row in rows]
        ids = pad_sequence([x.flip(0) for x in prompts], batch_first=True, padding_value=0).flip(1)
        mask = pad_sequence([torch.ones_like(x) for x in prompts], batch_first=True).flip(1)
        generated: Any = self.model.eval().generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.new_tokens,
            pad_token_id=0,
            do_sample=True,
            top_k=0,
        )
        self.model.train()
        stops = self.model.generation_config.eos_token_id or []  # pyright: ignore[reportOptionalMemberAccess]
        found = []
        for prompt, row in zip(prompts, generated[:, ids.shape[1] :].tolist(), strict=True):
            own = up_to_stop(row, stops)  # type: ignore[arg-type]
            found.append({"input_ids": prompt.tolist() + own, "completion_mask": [0] * len(prompt) + [1] * len(own)})
        return found

    def loss(self, rows: Sequence[Row]) -> Tensor:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        trained = [torch.tensor(row["completion_mask"]) for row in rows]
        batch = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
        }
        labels = batch["input_ids"].masked_fill(pad_sequence(trained, batch_first=True) == 0, IGNORED)[:, 1:]
        logits = self.model(**batch).logits[:, :-1]
        with torch.no_grad():
            others = self.teacher(**batch).logits[:, :-1]
        p, q = logits.log_softmax(-1), others.log_softmax(-1)
        mix = torch.logaddexp(p + torch.log(torch.tensor(1 - BETA)), q + torch.log(torch.tensor(BETA)))
        values = BETA * (q.exp() * (q - mix)).sum(-1) + (1 - BETA) * (p.exp() * (p - mix)).sum(-1)
        return values[labels != IGNORED].mean()


if __name__ == "__main__":
    main()
