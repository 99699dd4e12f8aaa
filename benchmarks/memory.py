"""Growth of resident memory during training steps, of one variant in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def growth_in_subprocess(
    variant: str,
    size: str,
    vocabulary: int,
    *,
    steps: int,
    max_length: int,
    data: Path | None,
    task: str = "sft",
    batch_size: int = 8,
) -> int:
    """Bytes by which the peak of `steps` steps exceeds the level after model and optimiser state exist."""
    command = [
        sys.executable, "-m", "benchmarks.memory", variant, size, str(vocabulary),
        "--steps", str(steps), "--max_length", str(max_length), *(["--data", str(data)] if data else []),
        "--task", task, "--batch_size", str(batch_size),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {variant} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["growth"]


class Level:
    """Resident memory of this process: mark a level, then ask how far above it the peak has been."""

    def mark(self) -> None:
        """Give freed memory back to the system, and let the kernel's peak start again from here."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self.bytes = _status("VmRSS")

    def growth(self) -> int:
        return _status("VmHWM") - self.bytes


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def measure(
    variant: str,
    size: str,
    vocabulary: int,
    *,
    steps: int,
    max_length: int,
    data: Path | None,
    task: str,
    batch_size: int,
) -> int:
    """One step fills the optimiser's state; the level is marked after it, when gradients are freed again."""
    import torch
    from benchmarks.variants import Recipe

    torch.set_num_threads(1)
    corpus, build, make, loops = _work(task, max_length=max_length, data=data)
    model, level = build(size, vocabulary), Level()
    recipe = Recipe(steps=steps + 1, batch_size=batch_size)
    if variant == "ours":
        trainer = make(model, corpus, recipe, sequential=True)
        trainer.add_callback(_mark_after_first_step(level))
        trainer.train()
        return level.growth()
    loop = loops[variant](model, recipe)
    del model
    for step in range(recipe.steps):
        first = step * recipe.batch_size
        loop.step(corpus.rows[first : first + recipe.batch_size])
        if step == 0:
            level.mark()
    return level.growth()


def _work(task: str, *, max_length: int, data: Path | None) -> tuple[Any, Any, Any, Any]:
    """Rows, model, trainer and loops of a method."""
    if task == "sft":
        from benchmarks.data import load_corpus
        from benchmarks.measure import make_trainer
        from benchmarks.variants import VARIANTS, build_model

        return load_corpus(data, max_length=max_length), build_model, make_trainer, VARIANTS
    from benchmarks.pair_data import load_pairs
    from benchmarks.preference_tasks import TASKS

    found = TASKS[task]
    return found.rows(load_pairs(data, max_length=max_length)), found.build, found.make, found.loops


def _mark_after_first_step(level: Level) -> Any:
    from transformers import TrainerCallback

    class Mark(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                level.mark()

    return Mark()


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = ArgumentParser()
    parser.add_argument("variant")
    parser.add_argument("size")
    parser.add_argument("vocabulary", type=int)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--max_length", type=int, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--task", default="sft")
    parser.add_argument("--batch_size", type=int, default=8)
    print(json.dumps({"growth": measure(**vars(parser.parse_args()))}))


if __name__ == "__main__":
    main()
