"""Tables and times go to the trackers that a run reports to and that are active, and nowhere else."""

import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from trl import DDPOConfig, PPOConfig
from trl.extras.profiling import profiling_context, profiling_decorator
from trl.reporting import trackers
from trl.reporting.trackers import (
    check_trackers,
    get_comet_experiment_url,
    log_table,
    log_table_to_comet_experiment,
    send_traces,
    start_trackers,
)

TABLE = pd.DataFrame({"prompt": ["a|b"], "completion": ["x\ny"]})


class Calls(list):
    def __call__(self, *args, **kwargs):
        self.append((args, kwargs))


@pytest.fixture
def wandb(monkeypatch):
    calls = Calls()
    module = SimpleNamespace(run=SimpleNamespace(url="u"), log=calls, Table=lambda dataframe: ("table", dataframe))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


@pytest.fixture
def comet(monkeypatch):
    calls = Calls()
    experiment = SimpleNamespace(url="https://comet.test/1", log_table=calls)
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(get_running_experiment=lambda: experiment))
    return calls


@pytest.fixture
def mlflow(monkeypatch):
    calls = Calls()
    module = SimpleNamespace(active_run=lambda: object(), log_table=calls, log_metrics=calls)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return calls


def test_nothing_is_loaded_or_sent_without_a_run():
    assert get_comet_experiment_url() is None
    assert trackers.get_wandb_run_url() is None
    log_table_to_comet_experiment("x.csv", TABLE)
    assert log_table("x", TABLE, ["wandb", "comet_ml", "mlflow", "trackio", "tensorboard", "codecarbon"]) == []


def test_tables_reach_every_active_tracker(wandb, comet, mlflow):
    writer = SimpleNamespace(add_text=Calls())
    reported = ["wandb", "comet_ml", "mlflow", "tensorboard"]
    assert log_table("completions", TABLE, reported, step=5, tensorboard_writer=writer) == reported
    assert wandb[0][0][0]["completions/step_00005"][0] == "table"  # W&B keeps the newest table of a key only
    log_table("completions", TABLE, ["wandb"], step=5, has_all_steps=True)
    assert list(wandb[1][0][0]) == ["completions"]
    assert comet == [((), {"tabular_data": TABLE, "filename": "completions.csv"})]
    assert mlflow == [((TABLE,), {"artifact_file": "completions_5.json"})]
    assert writer.add_text == [(("completions", "| prompt | completion |\n| --- | --- |\n| a\\|b | x<br>y |", 5), {})]
    assert get_comet_experiment_url() == "https://comet.test/1"


def test_a_table_reaches_trackio(monkeypatch, tmp_path):
    trackio = pytest.importorskip("trackio")
    from trackio import context_vars

    assert log_table("x", TABLE, ["trackio"]) == []
    calls = Calls()
    monkeypatch.setattr(trackio, "log", calls)
    token = context_vars.current_run.set(object())
    try:
        assert log_table("x", TABLE, ["trackio"], step=3) == ["trackio"]
    finally:
        context_vars.current_run.reset(token)
    assert calls[0][1] == {"step": 3}


def test_conversations_reach_trackio_as_traces(monkeypatch):
    trackio = pytest.importorskip("trackio")
    from trackio import context_vars

    calls, asked = Calls(), [{"role": "user", "content": "Why?"}]
    monkeypatch.setattr(trackio, "log", calls)
    monkeypatch.setattr(context_vars, "current_run", SimpleNamespace(get=lambda: object()))
    send_traces(
        "traces",
        [asked, "Two?"],
        [[{"role": "assistant", "content": "So."}], "2"],
        [{"a": 1.0}, {"a": None}],
        ["trackio"],
        step=3,
    )
    ((values,), options) = calls[0]
    assert options == {"step": 3} and [trace.metadata for trace in values["traces"]] == [{"a": 1.0}, {"a": None}]
    assert [[turn["content"] for turn in trace.messages] for trace in values["traces"]] == [
        ["Why?", "So."],
        ["Two?", "2"],
    ]
    send_traces("traces", ["x"], ["y"], [{}], ["wandb"], step=3)
    assert len(calls) == 1


class Trainer:
    def __init__(self, *report_to):
        self.args = SimpleNamespace(report_to=list(report_to))
        self.state = SimpleNamespace(global_step=7)
        self.accelerator = SimpleNamespace(is_main_process=True)

    @profiling_decorator
    def work(self, value):
        """Doubles."""
        return 2 * value


def test_times_are_logged_by_trainer_and_method(wandb, mlflow):
    assert Trainer("wandb", "mlflow").work(4) == 8
    ((name, seconds),) = wandb[0][0][0].items()
    assert name == "profiling/Time taken: Trainer.work"
    assert 0 <= seconds < 5
    assert mlflow[0][1] == {"step": 7}
    assert (Trainer.work.__name__, Trainer.work.__doc__) == ("work", "Doubles.")


def test_no_times_without_a_tracker_or_off_the_main_process(wandb):
    Trainer("tensorboard").work(1)
    other = Trainer("wandb")
    other.accelerator.is_main_process = False
    with profiling_context(other, "x"):
        pass
    assert wandb == []


def test_trackers_that_are_unknown_or_not_installed_are_refused(monkeypatch):
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: ["mlflow"])
    for fine in (None, [], "none", "all", "mlflow", ["mlflow", "flyte"]):
        check_trackers(fine)
    with pytest.raises(ValueError, match=r"report_to must name trackers \(.*wandb.*, got 'tensorbord'"):
        check_trackers(["mlflow", "tensorbord"])
    with pytest.raises(ImportError, match=r"`pip install wandb`, or name one that is installed \(mlflow\)"):
        check_trackers("wandb")
    with pytest.raises(ImportError, match=r"report_to='trackio' .* `pip install 'trl\[tracking\]'`"):
        check_trackers(["trackio"])


PUSHED = {"push_to_hub_if_best_kwargs": {"repo_id": "me/policy", "token": "s3cret"}}


@pytest.mark.parametrize(("kind", "named"), [(PPOConfig, PUSHED), (DDPOConfig, {"run_name": "first"})])
def test_trackers_are_told_the_settings_without_keys_of_accounts(kind, named):
    calls = Calls()
    keys = {"wandb": {"api_key": "s3cret", "config": {"data/name": "sums"}}}
    config = kind(log_with="wandb", tracker_kwargs=keys, **named)
    start_trackers(SimpleNamespace(init_trackers=calls), config)
    (((project,), given),) = calls
    name = {"name": named["run_name"]} if "run_name" in named else {}
    assert project == "trl" and given["init_kwargs"] == {"wandb": {**name, **keys["wandb"]}}
    assert given["config"]["log_with"] == "wandb" and "s3cret" not in str(given["config"])
    start_trackers(SimpleNamespace(init_trackers=calls), kind())
    assert len(calls) == 1
