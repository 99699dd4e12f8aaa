"""Experiment trackers: the address of the active run; tables, numbers and times sent to those that a run reports to."""

import functools
import json
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from transformers import Trainer

from trl.options.secrets import redacted
from trl.options.shared import flatten_dict
from trl.reporting.tables import Entry

if TYPE_CHECKING:
    from pandas import DataFrame

_NOT_LOOKED_FOR = ("azure_ml", "flyte")  # transformers (5.19) does not say in every case whether these are installed
_TIMED = ("wandb", "mlflow")
_WITH_KEYS = ("tracker_kwargs", "push_to_hub_if_best_kwargs")


def check_trackers(report_to: str | Iterable[str] | None) -> None:
    """Raise ValueError for an unknown tracker in `report_to`, ImportError for one that is not installed."""
    from transformers.integrations import integration_utils

    known = list(integration_utils.INTEGRATION_TO_CALLBACK)
    installed = integration_utils.get_available_reporting_integrations()
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    for name in names:
        if name in ("none", "all"):
            continue
        if name not in known:
            raise ValueError(f"report_to must name trackers ({', '.join(known)}), 'all' or 'none', got {name!r}.")
        if name not in installed and name not in _NOT_LOOKED_FOR:
            package = "'trl[tracking]'" if name in ("tensorboard", "trackio") else name
            others = f"name one that is installed ({', '.join(installed)})" if installed else "leave it out"
            fault = f"report_to={name!r} needs a package that is not installed"
            raise ImportError(f"{fault}. Install it with `pip install {package}`, or {others}.")


def start_trackers(accelerator: Accelerator, config: Any) -> None:
    """Send a run's settings to the tracker of `log_with`, if any, except those that may hold keys of an account."""
    if config.log_with is None:
        return
    told = redacted({name: value for name, value in vars(config).items() if name not in _WITH_KEYS})
    plain = (bool, int, float, str)  # what TensorBoard takes
    settings = {name: v if isinstance(v, plain) else str(v) for name, v in flatten_dict(told).items()}
    options = dict(config.tracker_kwargs)
    if config.log_with == "wandb" and getattr(config, "run_name", ""):
        options["wandb"] = {"name": config.run_name, **options.get("wandb", {})}
    accelerator.init_trackers(config.tracker_project_name, config=settings, init_kwargs=options)


def active_wandb_run() -> object:
    """The Weights & Biases run of this process; `None` if the package was not loaded or has no run."""
    return getattr(sys.modules.get("wandb"), "run", None)


def active_comet_experiment() -> Any | None:
    """The Comet experiment of this process; `None` if the package was not loaded or none is running."""
    comet = sys.modules.get("comet_ml")
    return comet.get_running_experiment() if comet is not None else None


def get_wandb_run_url() -> str | None:
    """The address of the active Weights & Biases run, `None` without one."""
    return getattr(active_wandb_run(), "url", None)


def get_comet_experiment_url() -> str | None:
    """The address of the running Comet experiment, `None` without one."""
    return getattr(active_comet_experiment(), "url", None)


def log_table_to_comet_experiment(name: str, table: "DataFrame") -> None:
    """Attach a `pandas.DataFrame` to the running Comet experiment under the file name `name`, if there is one."""
    experiment = active_comet_experiment()
    if experiment is not None:
        experiment.log_table(tabular_data=table, filename=name)


def log_table(
    name: str, table: "DataFrame", report_to: Iterable[str], *, step: int | None = None, tensorboard_writer: Any = None,
    has_all_steps: bool = False,
) -> list[str]:  # fmt: skip
    """Send a `pandas.DataFrame` to every tracker in `report_to` that shows tables and has a run. Returns their names.

    `name` is the table's key. W&B keeps the newest table of a key, so its keys end with the step, unless the table
    `has_all_steps`. TensorBoard has no global run: its writer is passed as `tensorboard_writer`.
    """
    sent, modules = [], sys.modules
    for tracker in report_to:
        if tracker == "tensorboard" and tensorboard_writer is not None:  # its text panel renders Markdown
            lines = [list(table.columns), ["---"] * len(table.columns), *table.itertuples(index=False)]
            cells = [[str(value).replace("|", "\\|").replace("\n", "<br>") for value in line] for line in lines]
            tensorboard_writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)
        elif tracker == "wandb" and active_wandb_run() is not None:
            key = name if step is None or has_all_steps else f"{name}/step_{step:05d}"
            modules["wandb"].log({key: modules["wandb"].Table(dataframe=table)})
        elif tracker == "trackio" and _has_trackio_run():
            modules["trackio"].log({name: modules["trackio"].Table(dataframe=table)}, step=step)
        elif tracker == "comet_ml" and active_comet_experiment() is not None:
            log_table_to_comet_experiment(f"{name}.csv", table)
        elif tracker == "mlflow" and _active_mlflow_run() is not None:
            modules["mlflow"].log_table(table, artifact_file=f"{name}_{step}.json")
        else:
            continue
        sent.append(tracker)
    return sent


def send_traces(
    name: str, prompts: Sequence[Entry], completions: Sequence[Entry], numbers: Sequence[Mapping[str, object]],
    report_to: Iterable[str], *, step: int,
) -> None:  # fmt: skip
    """Send conversations to trackio, if it is in `report_to` and has a run, as traces with `numbers` beside each."""
    trackio = sys.modules.get("trackio")
    if "trackio" not in report_to or not _has_trackio_run() or not hasattr(trackio, "Trace"):
        return
    assert trackio is not None
    traces = []
    for prompt, completion, values in zip(prompts, completions, numbers, strict=True):
        roles = (("user", prompt), ("assistant", completion))
        turns = [[{"role": role, "content": text}] if isinstance(text, str) else text for role, text in roles]
        messages = json.loads(json.dumps([*turns[0], *turns[1]], default=str))
        traces.append(trackio.Trace(messages, metadata=dict(values)))
    trackio.log({name: traces}, step=step)


def _has_trackio_run() -> bool:
    run = getattr(sys.modules.get("trackio.context_vars"), "current_run", None)
    return "trackio" in sys.modules and run is not None and run.get() is not None


def _active_mlflow_run() -> object:
    mlflow = sys.modules.get("mlflow")
    return mlflow.active_run() if mlflow is not None else None


@contextmanager
def profiling_context(trainer: Trainer, name: str) -> Generator[None, None, None]:
    """Time the block and log it as `profiling/Time taken: <trainer class>.<name>`, in seconds, on the main process.

    Only wandb and mlflow take values between two logs. On an accelerator the time is that of calls, not of kernels.
    """
    report_to: Any = trainer.args.report_to  # a list of names, once TrainingArguments has read it
    if not any(tracker in report_to for tracker in _TIMED):
        yield
        return
    start = time.perf_counter()
    yield
    if trainer.accelerator.is_main_process:
        values = {f"profiling/Time taken: {type(trainer).__name__}.{name}": time.perf_counter() - start}
        if "wandb" in report_to and active_wandb_run() is not None:
            sys.modules["wandb"].log(values)
        if "mlflow" in report_to and _active_mlflow_run() is not None:
            sys.modules["mlflow"].log_metrics(values, step=trainer.state.global_step)


def profiling_decorator(func: Callable) -> Callable:
    """Time each call of a trainer's method with `profiling_context`, under the method's name."""

    @functools.wraps(func)
    def timed(self: Trainer, *args: object, **kwargs: object) -> object:
        with profiling_context(self, func.__name__):
            return func(self, *args, **kwargs)

    return timed
