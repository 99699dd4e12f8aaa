"""Runs on the screen: lines, the old dicts, and who has a callback of his own."""

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import logging

from tests.experimental import ppo_runs
from tests.trainer import dpo_runs, grpo_runs, iterative_runs, sft_runs
from trl.reporting import run_lines
from trl.reporting.run_lines import RunLines

ROWS = [{"prompt": "What colour is the sky?", "completion": " It is blue."}] * 8


def lines_of(capsys: Any, trainer: Any) -> list[str]:
    """What a training prints on stdout."""
    capsys.readouterr()
    trainer.train()
    return capsys.readouterr().out.splitlines()


def test_a_log_is_a_line_and_a_table_ends_the_run(capsys: Any) -> None:
    trainer = sft_runs.make(
        ROWS, max_steps=3, eval_strategy="steps", eval_steps=3, trainer={"eval_dataset": trl_rows()}
    )
    lines = lines_of(capsys, trainer)
    steps = [line.split()[0] for line in lines[:3]]
    assert steps == ["1/3", "2/3", "3/3"]
    assert all("loss" in line and "acc" in line and "tok/s" in line and line.endswith("left") for line in lines[:3])
    assert max(map(len, lines)) <= 80
    assert not any("\r" in line or "\x1b" in line for line in lines)  # no terminal, no control characters
    assert lines[3].split()[:2] == ["eval", "loss"]
    losses = sft_runs.logged(trainer, "loss")
    table = next(line for line in lines[4:] if line.startswith("loss")).split()
    assert [float(cell) for cell in table[1:]] == pytest.approx([losses[0], min(losses), losses[-1]], abs=6e-4)
    assert lines[-1].startswith("time ") and "tokens " in lines[-1]


def trl_rows() -> Any:
    """Rows to evaluate on."""
    from datasets import Dataset

    return Dataset.from_list(ROWS)


@pytest.mark.parametrize(
    ("make", "labels"),
    [(lambda: dpo_runs.make(disable_tqdm=True, logging_steps=1, max_steps=1), ["loss", "acc", "margin"]),
     (lambda: grpo_runs.make(logging_steps=1, max_steps=1)[0], ["reward", "loss"])],
)  # fmt: skip
def test_each_method_has_its_numbers(capsys: Any, make: Any, labels: list[str]) -> None:
    line = next(line for line in lines_of(capsys, make()) if line.split()[0].startswith("1/"))
    assert [word for word in line.split() if word in {*run_lines.SHOWN.values()}][: len(labels)] == labels


def test_dict_gives_the_old_output_and_histories_are_equal(capsys: Any) -> None:
    old = sft_runs.make(ROWS, log_format="dict")
    assert lines_of(capsys, old)[0].startswith("{'loss': ")
    new = sft_runs.make(ROWS)
    new.train()
    timed = ("runtime", "per_second")
    histories = [
        [{k: v for k, v in logs.items() if not k.endswith(timed)} for logs in trainer.state.log_history]
        for trainer in (old, new)
    ]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("kind", [PrinterCallback, ProgressCallback])
def test_removing_the_callback_of_transformers_removes_the_lines(capsys: Any, kind: type) -> None:
    trainer = sft_runs.make(ROWS)
    trainer.remove_callback(kind)
    assert lines_of(capsys, trainer) == []


def test_a_callback_of_the_user_stays() -> None:
    class Mine(PrinterCallback):
        pass

    trainer = sft_runs.make(ROWS, trainer={"callbacks": [Mine()]})
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert Mine in kinds and RunLines not in kinds


def test_other_processes_print_nothing(capsys: Any) -> None:
    lines = RunLines()
    lines.on_train_begin(None, SimpleNamespace(global_step=0), None)
    lines.on_log(None, SimpleNamespace(is_world_process_zero=False), None, logs={"loss": 1.0})
    assert capsys.readouterr().out == ""


def test_an_evaluation_without_a_loss_is_a_line(capsys: Any) -> None:
    lines = RunLines()
    state = SimpleNamespace(is_world_process_zero=True, max_steps=10, global_step=5)
    lines.on_log(None, state, None, logs={"eval_objective/scores": 0.25, "eval_objective/kl": 0.5, "eval_runtime": 2.0})
    assert capsys.readouterr().out == " eval  reward  0.250  KL  0.500\n"


@pytest.mark.parametrize(("log_format", "has_lines"), [("auto", False), ("lines", True)])
def test_the_table_of_a_notebook_stays_unless_lines_are_set(monkeypatch: Any, log_format: str, has_lines: bool) -> None:
    class NotebookTable(TrainerCallback):
        pass

    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", NotebookTable)
    trainer = sft_runs.make(ROWS, disable_tqdm=False, log_format=log_format)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert (RunLines in kinds, NotebookTable in kinds) == (has_lines, not has_lines)


def test_logs_with_the_time_of_the_run_are_lines(capsys: Any) -> None:
    trainer = sft_runs.make(ROWS, max_steps=2, include_num_input_tokens_seen="all")  # adds `train_runtime`
    lines = lines_of(capsys, trainer)
    assert [line.split()[0] for line in lines] == ["1/2", "2/2", "first", "loss", "acc", "time"]


@pytest.mark.parametrize(("most", "first"), [(-1, "1  loss"), (2, "1/2  loss")])
def test_a_loop_of_the_user_has_lines(capsys: Any, most: int, first: str) -> None:
    trainer, _ = iterative_runs.make(logging_steps=1, max_steps=most, disable_tqdm=False)
    capsys.readouterr()
    for _ in range(2):
        trainer.step(texts=["The sky is blue."])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].strip().startswith(first)
    assert all(line.endswith("left") is (most > 0) for line in lines)


@pytest.mark.parametrize("settings", [{"log_level": "error"}, {"logging_strategy": "no"}])
def test_a_silent_run_prints_nothing(capsys: Any, settings: dict[str, Any]) -> None:
    verbosity = logging.get_verbosity()
    assert lines_of(capsys, sft_runs.make(ROWS, **settings)) == []
    logging.set_verbosity(verbosity)  # which `log_level` sets for the process


def test_a_resumed_run_goes_on_with_its_numbers(capsys: Any, tmp_path: Any) -> None:
    settings = {"folder": tmp_path, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    sft_runs.make(ROWS, **settings).train()
    capsys.readouterr()
    sft_runs.make(ROWS, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "/3" in line] == ["3/3"]


@pytest.mark.parametrize(
    ("make", "settings"),
    [(grpo_runs.make, {"method": "grpo"}), (grpo_runs.make, {"method": "rloo"}),
     (grpo_runs.make, {"method": "distillation", "teacher": "gpt2"}),
     (grpo_runs.make, {"method": "online_dpo"}), (grpo_runs.make, {"method": "nash_md", "num_generations": 2}),
     (grpo_runs.make, {"method": "xpo", "num_generations": 2}), (ppo_runs.make, {})],
    ids=["grpo", "rloo", "distillation", "online_dpo", "nash_md", "xpo", "ppo"],
)  # fmt: skip
def test_a_sample_before_and_after_moves_nothing(capsys: Any, make: Any, settings: dict[str, Any]) -> None:
    weights, states = [], []
    for log_format in ("dict", "lines"):
        trainer, _ = make(**settings, max_steps=2, log_format=log_format)
        torch.manual_seed(3)
        lines = lines_of(capsys, trainer)
        labels = [line.split()[0] for line in lines if line.startswith(("prompt ", "before ", "after "))]
        assert labels == (["prompt", "before", "after"] if log_format == "lines" else [])
        assert max(map(len, lines)) <= 80 or log_format == "dict"
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
        states.append((torch.get_rng_state(), trainer.model.training))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert torch.equal(states[0][0], states[1][0]) and states[0][1] == states[1][1]


def test_generation_has_a_bar_on_a_terminal(monkeypatch: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    trainer, _ = grpo_runs.make(max_steps=1)
    for terminal, delay, is_shown in ((Terminal(), 0.0, True), (Terminal(), 60.0, False), (io.StringIO(), 0.0, False)):
        monkeypatch.setattr(run_lines, "BAR_DELAY", delay)
        monkeypatch.setattr("sys.stderr", terminal)
        trainer.rollouts.make(0)
        assert ("generating" in terminal.getvalue()) is is_shown


def test_a_sample_is_the_first_completion_and_the_greedy_one_at_the_end(capsys: Any) -> None:
    trainer, _ = grpo_runs.make(max_steps=2, log_format="lines")
    made: list[Any] = []
    make = trainer.rollouts.make
    trainer.rollouts.make = lambda number: made.append(make(number)) or made[-1]
    lines = {line.split()[0]: line[9:] for line in lines_of(capsys, trainer)}
    decode = trainer.processing_class.decode
    first = made[0].completions.split()[0].tolist()
    assert lines["before"] == (decode(first, skip_special_tokens=True) or "-")
    prompt = made[0].prompts.split()[0].tolist()
    greedy = replace(trainer.sampling, temperature=0.0)
    answer = trainer.rollouts.engine.generate([prompt], greedy, streams=[5])[0].ids
    assert lines["after"] == (decode(answer, skip_special_tokens=True) or "-")


def test_a_sample_that_fails_does_not_end_a_finished_run(monkeypatch: Any, caplog: Any) -> None:
    trainer, _ = grpo_runs.make(max_steps=1, log_format="lines")

    def fail(*texts: str) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("trl.trainer.samples.print_sample", fail)
    assert trainer.train().global_step == 1
    assert "The sample answer after training failed: out of memory" in caplog.text
