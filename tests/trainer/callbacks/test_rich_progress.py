"""The rich display follows a run and gives the terminal back."""

import io

from datasets import Dataset
from rich.console import Console

from tests.trainer.callbacks.runs import trainer
from trl.reporting.rich_progress import RichProgress
from trl.trainer.callbacks import RichProgressCallback


def test_the_display_shows_steps_and_newest_metrics():
    output = io.StringIO()
    display = RichProgress(10, Console(file=output, force_terminal=True, width=100))
    display.advance_to(3)
    display.show({"loss": 1.23456, "total_flos": 1e9})
    display.show({"entropy": 0.5})
    display.advance_evaluation(4)
    display.end_evaluation()
    display.stop()
    assert display.metrics == {"loss": "1.235", "entropy": "0.5"}
    text = output.getvalue()
    assert "3/10" in text
    assert "1.235" in text
    assert "total_flos" not in text


def test_a_run_with_evaluation(tmp_path, monkeypatch, capsys):
    shown, stepped, evaluated = [], [], []
    monkeypatch.setattr(RichProgress, "show", lambda self, logs: shown.append(dict(logs)))
    monkeypatch.setattr(RichProgress, "advance_to", lambda self, step: stepped.append(step))
    monkeypatch.setattr(RichProgress, "advance_evaluation", lambda self, total: evaluated.append(total))
    callback = RichProgressCallback()
    rows = Dataset.from_dict({"input_ids": [[4, 5, 6]] * 4, "labels": [[4, 5, 6]] * 4})
    run = trainer(
        tmp_path, callbacks=[callback], steps=2, eval_strategy="steps", eval_steps=2, eval_dataset=rows
    )
    run.train()
    assert stepped == [0, 1, 2]
    assert evaluated == [2, 2]
    assert [logs["step"] for logs in shown if "loss" in logs] == [1, 2]
    assert callback.progress is None


def test_silent_off_the_main_process_and_outside_training():
    callback = RichProgressCallback()
    callback.on_log(None, None, None, logs={"loss": 1.0})
    callback.on_prediction_step(None, None, None)
    callback.on_evaluate(None, None, None)
    callback.on_train_end(None, None, None)
    assert callback.progress is None
