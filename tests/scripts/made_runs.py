"""Folders of runs as training writes them, made without training."""

import json
import random
from pathlib import Path

from trl.reporting.run_events import RunEvents

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & <!--"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "seven", "birds", "in", "an", "old", "tree"]
SEARCH = [
    {"role": "assistant", "content": "I look it up.", "tool_calls": [{"function": {"name": "search", "arguments": {"query": HOSTILE}}}]},
    {"role": "tool", "content": f"Two cats. {HOSTILE}"},
    {"role": "assistant", "content": "Two."},
]  # fmt: skip


def batch(step: int, share: float, draw: random.Random, *, rows: int, tokens: int) -> dict[str, list[object]]:
    """Completions in groups of four, of which one is hostile and one has turns."""
    table: list[dict[str, object]] = []
    for row in range(rows):
        pieces = [f" {draw.choice(WORDS)}" for _ in range(tokens)]
        text, reward = "".join(pieces), float(draw.random() < share)
        said = {0: HOSTILE + text, 1: json.dumps(SEARCH)}.get(row, text)
        table.append({
            "prompt": f"What does cat {row // 4 + step % 3} do?", "completion": said, "correct": reward, "advantage": reward - share,
            "reward": reward, "group": row // 4, "token_texts": pieces, "token_logps": [*(-8 * draw.random() ** 3 for _ in pieces[1:]), float("nan")],
            "token_entropies": [0.5] * tokens if row < 4 else None, "chat_completion": row == 1,
            "chat_prompt": False,
        })  # fmt: skip
    return {name: [row[name] for row in table] for name in table[0]}


def make_run(
    folder: Path, *, steps: int = 12, parts: int = 4, rows: int = 8, tokens: int = 20, metrics: int = 2, ends: bool = True,
    seed: int = 0, grows: bool = False,
) -> Path:  # fmt: skip
    """A run with `parts` files of completions, and `metrics` more numbers in each log."""
    draw, events = random.Random(seed), RunEvents(folder, f"run{seed}", step=0)
    events.write(
        "start", 0, time=0.0, run=f"run{seed}", method="GRPO", steps=steps, model="tiny",
        settings={"learning_rate": 1e-5 * (1 + seed), "output_dir": str(folder), "beta": 0.04, "note": HOSTILE},
        data={"rows": 500, "summaries": ["500 rows"], "lengths": [(3, "0 to 10 tokens"), (9, "10 to 20 tokens"), (1, "20 to 30 tokens")]},
        parameters=[1000, 2000], processes=1, device="cpu", versions={"python": "3.11"},
    )  # fmt: skip
    for step in range(1, steps + 1):
        share, columns = step / steps, None
        if step % max(1, steps // parts) == 0:
            columns = batch(step, share, draw, rows=rows, tokens=tokens)
        rewards, lengths = (
            [float(draw.random() < share) for _ in range(16)],
            [draw.randint(5, 9 + step) for _ in range(16)],
        )
        if columns is not None:
            events.write_part(folder, step, columns)
        facts = {"time": float(step), "of": 16, "rewards": rewards, "lengths": lengths, "repeated": 0.0, "equal": 0.0}
        events.write("rollouts", step, **facts)
        values = {
            "loss": draw.gauss(0, 1),
            "reward": share,
            **({"completions/mean_length": 5.0 + step} if grows else {}),
            **{f"metric/{n}": draw.gauss(n, 1) for n in range(metrics)},
        }
        seconds = {"rollouts and data": 0.6, "training": 0.3, "logging": 0.1}
        events.write("log", step, time=float(step), values=values, seconds=seconds, memory=2.0**30)
    if ends:
        events.write("end", steps, time=float(steps))
    events.close()
    return folder
