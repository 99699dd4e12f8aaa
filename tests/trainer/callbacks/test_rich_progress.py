"""The rich display follows a run and gives the terminal back."""

import io
from types import SimpleNamespace

from datasets import Dataset
from rich.console import Console

from tests.trainer.callbacks.runs import trainer
from trl.trainer.callbacks import RichProgressCallback


def test_the_display_shows_steps_and_newest_metrics():
    output = io.StringIO()
    callback = RichProgressCallback()
    callback.console = Console(file=output, force_terminal=True, width=100)
    state = SimpleNamespace(is_world_process_zero=True, max_steps=10, global_step=0)
    callback.on_train_begin(None, state, None)
    state.global_step = 3
    callback.on_step_end(None, state, None)
    callback.on_log(None, state, None, logs={"loss": 1.23456, "total_flos": 1e9})
    callback.on_log(None, state, None, logs={"entropy": 0.5})
    callback.on_prediction_step(None, state, None, eval_dataloader=range(4))
    callback.on_evaluate(None, state, None)
    callback.on_train_end(None, state, None)
    assert callback.metrics == {"step": "3", "loss": "1.235", "entropy": "0.5"} and callback.live is None
    text = output.getvalue()
    assert "3/10" in text and "1.235" in text and "total_flos" not in text


def test_a_run_with_evaluation(tmp_path, monkeypatch):
    updates = []
    monkeypatch.setattr("rich.progress.Progress.update", lambda self, task, **given: updates.append(given))
    callback = RichProgressCallback()
    rows = Dataset.from_dict({"input_ids": [[4, 5, 6]] * 4, "labels": [[4, 5, 6]] * 4})
    run = trainer(tmp_path, callbacks=[callback], steps=2, eval_strategy="steps", eval_steps=2, eval_dataset=rows)
    run.train()
    assert [given["completed"] for given in updates if "completed" in given] == [1, 2]
    assert [given["total"] for given in updates if "total" in given] == [2, 2]
    assert callback.metrics["step"] == "2" and {"loss", "eval_loss"} <= callback.metrics.keys()
    assert callback.live is None
