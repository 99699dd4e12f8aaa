"""A run on the screen: one line per log, a bar for evaluations over two seconds, and a table at the end."""

import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerState, TrainingArguments, trainer
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import has_length

from trl.reporting.tables import duration

try:
    import resource
except ImportError:  # Windows
    resource = None

LogFormat = Literal["auto", "lines", "dict"]
Logs = Mapping[str, Any]  # numbers by name
Item = TypeVar("Item")
# First, best and last value of each metric, by the prefix of the evaluation ("" for training).
Table = dict[str, dict[str, tuple[float, float, float]]]
BAR_DELAY = 2.0  # seconds before a bar is shown
MOST_SHOWN = 3  # metrics on a line
COLUMNS = 80  # a longer line loses the last of its metrics
# Numbers in order of precedence: a line has the first of them that were logged; the table at the end follows its first.
SHOWN = {
    "reward": "reward", "objective/scores": "reward", "exact_match": "exact", "objective/kl": "KL", "loss": "loss",
    "accuracy": "acc", "margin": "margin", "rewards/accuracies": "acc", "rewards/margins": "margin", "kl": "KL",
    "approx_kl": "KL", "mean_token_accuracy": "acc", "completions/mean_length": "length", "on_policy_loss": "on-policy",
    "entropy": "entropy", "grad_norm": "grad",
}  # fmt: skip
RISING = {"reward", "objective/scores", "exact_match"}  # leading numbers whose best value is the largest


def short_number(value: float) -> str:
    """A number in at most 5 characters, for counts and rates.

    >>> short_number(0.25), short_number(950), short_number(12_345), short_number(420_000)
    ('0.25', '950', '12.3k', '420k')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{1 if value < 100 * size else 0}f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def peak_memory() -> float:
    """Peak memory in bytes: of the GPU where there is one, else the resident set of the process; 0 where unknown."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    if resource is None:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def metric_cells(logs: Logs, prefix: str = "") -> list[str]:
    """The numbers of a line with their labels, in columns of equal width.

    >>> metric_cells({"loss": 2.5, "learning_rate": 1e-3, "mean_token_accuracy": 0.25})
    ['loss  2.500', 'acc  0.250']
    """
    names = [name for name in SHOWN if isinstance(logs.get(prefix + name), int | float)]
    return [f"{SHOWN[name]} {_value(logs[prefix + name]):>6}" for name in names[:MOST_SHOWN]]


def _value(value: float) -> str:
    """A number in 6 characters, with its sign where it is smaller than 1000."""
    size = abs(value)
    if size >= 1e4 or 0 < size < 5e-4:
        return f"{value:.0e}"
    return f"{value:.{3 if size < 10 else 2 if size < 100 else 1}f}"


class RunLines(ProgressCallback, PrinterCallback):
    """One aligned line per log, and a table of first, best and last at the end; on the main process only.

    It inherits from transformers' callbacks, so that removing either removes it.
    """

    def __init__(self, counted: Literal["tokens", "images"] = "tokens") -> None:
        super().__init__()
        self.counted, self.rate = counted, {"tokens": "tok/s", "images": "img/s"}[counted]
        self.began: float | None = None  # None: not in a run
        self.last_time, self.first_step = 0.0, 0
        self.last_tokens: float | None = None
        self.saved: str | None = None
        self.table: Table = {}

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Start the clock; the steps of a resumed run go on from its checkpoint."""
        self.began = self.last_time = time.perf_counter()
        self.first_step, self.last_tokens, self.saved, self.table = state.global_step, None, None, {}

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Lines replace the bar of the steps."""

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: object, eval_dataloader: Any = None,
        **kwargs: object,
    ) -> None:  # fmt: skip
        """Advance the bar of the evaluation."""
        if not state.is_world_process_zero or args.disable_tqdm or not sys.stderr.isatty():
            return
        if self.prediction_bar is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self.prediction_bar = long_bar((), "evaluating", total=total)
        self.prediction_bar.update(1)

    def on_log(self, args: object, state: TrainerState, control: object, logs: Any = None, **kwargs: object) -> None:
        """Print a log of training or evaluation as a line, and one that has none of the numbers as it is."""
        if not state.is_world_process_zero or not logs:
            return
        if "train_loss" in logs and self.began is not None:  # the summary of a run
            facts = [f"time {duration(time.perf_counter() - self.began)}"]
            if (count := logs.get(f"num_{self.counted}", self.last_tokens)) is not None:
                facts.append(f"{self.counted} {short_number(count)}")
            if memory := peak_memory():
                facts.append(f"peak memory {memory / 2**30:.1f}G")
            for row in [*summary_rows(self.table), "   ".join(facts)]:
                _print(row)
            if self.saved is not None:
                _print(f"Newest checkpoint: {self.saved}")
            return
        training = metric_cells(logs)
        prefixes = [name.removesuffix("runtime") for name in logs if name.endswith("_runtime")]
        cells = training or (metric_cells(logs, prefixes[0]) if prefixes else [])
        if not cells:
            _print(str({name: value for name, value in logs.items() if name != "total_flos"}))
            return
        # A loop of the user has no end.
        steps = "" if state.max_steps == sys.maxsize else f"/{state.max_steps}"
        width = len(steps) - 1 if steps else 4
        if not training:
            self.last_time += logs[f"{prefixes[0]}runtime"]  # tokens per second are those of training
            self._keep(logs, prefixes[0])
            _print("  ".join([f"{prefixes[0][:-1]:>{2 * width + 1}}", *cells]))
            return
        self._keep(logs)
        start, pace = f"{state.global_step:>{width}}{steps}", self._pace(state, logs)
        while len(line := "  ".join([start, *cells, *pace])) > COLUMNS and len(cells) > 1:
            cells.pop()
        _print(line)

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """The table was printed with the last log."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        """Keep where the newest checkpoint is."""
        self.saved = f"{args.output_dir}/checkpoint-{state.global_step}"

    def _keep(self, logs: Logs, prefix: str = "") -> None:
        for name in SHOWN:
            if isinstance(value := logs.get(prefix + name), int | float):
                metrics = self.table.setdefault(prefix, {})
                first, best, _ = metrics.get(name, (value, value, value))
                metrics[name] = (first, (max if name in RISING else min)(best, value), value)

    def _pace(self, state: TrainerState, logs: Logs) -> list[str]:
        """Tokens or images per second since the last line, memory, and the time left at the pace of this run."""
        if self.began is None:  # logged before the run
            return []
        now, cells = time.perf_counter(), []
        tokens = logs.get(f"num_{self.counted}")
        if tokens is not None:
            # A resumed run counts on; its first window starts at a number that is not known here.
            start = 0.0 if self.last_tokens is None and self.first_step == 0 else self.last_tokens
            if start is not None:
                rate = (tokens - start) / max(now - self.last_time, 1e-9)
                cells.append(f"{short_number(rate):>5} {self.rate}")
            self.last_tokens, self.last_time = tokens, now
        if memory := peak_memory():
            cells.append(f"{memory / 2**30:.1f}G")
        done = state.global_step - self.first_step
        if done > 0 and state.max_steps < sys.maxsize:
            cells.append(f"{duration((now - self.began) / done * (state.max_steps - state.global_step))} left")
        return cells


def long_bar(items: Iterable[Item], title: str, is_shown: bool = True, *, total: int | None = None) -> "tqdm[Item]":
    """The items, with a bar on a terminal after two seconds."""
    disable = None if is_shown else True  # None: where stderr is no terminal
    return tqdm(items, title, total, leave=False, dynamic_ncols=True, delay=BAR_DELAY, disable=disable)


def summary_rows(table: Table) -> list[str]:
    """The table at the end. Only the leading number of training, and of each evaluation, has a best.

    >>> print("\\n".join(summary_rows({"": {"loss": (3.0, 1.0, 2.0), "entropy": (0.1, 0.1, 0.4)}})))
                 first     best     last
    loss         3.000    1.000    2.000
    entropy      0.100        -    0.400
    """
    rows = []
    for prefix, metrics in sorted(table.items()):  # training first
        for index, name in enumerate([name for name in SHOWN if name in metrics][: MOST_SHOWN - 1]):
            first, best, last = map(_value, metrics[name])
            rows.append((f"{prefix[:-1]} {SHOWN[name]}".strip(), first, "-" if index else best, last))
    width = max((len(label) for label, *_ in rows), default=0) + 2
    heads = [("", "first", "best", "last")] if rows else []
    return [f"{label:<{width}}" + "".join(f"{cell:>9}" for cell in cells) for label, *cells in [*heads, *rows]]


def print_sample(prompt: str, before: str, after: str) -> None:
    """Print a prompt with a completion before and one after training, at most two lines each.

    >>> print_sample("What is 2 + 3?", "7 7 7", "5")
    prompt   What is 2 + 3?
    before   7 7 7
    after    5
    """
    for label, text in (("prompt", prompt), ("before", before), ("after", after)):
        # A model must not command the terminal.
        shown = "".join(sign if sign.isprintable() else " " for sign in text)
        rows = textwrap.wrap(" ".join(shown.split()), COLUMNS - 9, max_lines=2, placeholder=" ...")
        _print("\n".join(f"{label if not index else '':<9}{row}" for index, row in enumerate(rows or ["-"])))


def _print(line: str) -> None:
    """On stdout, above bars if there are some; characters that its encoding lacks become "?"."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    tqdm.write(line.encode(encoding, errors="replace").decode(encoding), file=sys.stdout)
    sys.stdout.flush()


def use_run_lines(handler: CallbackHandler, user_callbacks: Sequence[object], args: Any) -> None:
    """Put `RunLines` in the place of the callback that `transformers.Trainer` prints with by default.

    The default stays with `log_format="dict"`, in notebooks unless `log_format="lines"`, and beside a user's own
    callback of these kinds. Nothing is printed where `log_level` or `logging_strategy` says so.
    """
    kinds = (PrinterCallback, ProgressCallback)
    types = [callback if isinstance(callback, type) else type(callback) for callback in user_callbacks]
    has_other = any(issubclass(kind, kinds) for kind in types)
    log_format: LogFormat = getattr(args, "log_format", "dict")
    if log_format == "dict" or has_other:
        return
    is_silent = args.log_level in ("error", "critical") or args.logging_strategy == "no"
    callbacks = handler.callbacks
    for index, callback in enumerate([*callbacks]):
        # What transformers prints with by default is a table in a notebook.
        if type(callback) in kinds or (log_format == "lines" and type(callback) is trainer.DEFAULT_PROGRESS_CALLBACK):
            callbacks[index : index + 1] = [] if is_silent else [RunLines()]
