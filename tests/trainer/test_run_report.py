"""What trainers write for `trl report`: logs and completions as they were, once each, also in a resumed run."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from tests.trainer import grpo_runs, grpo_tool_runs, ppo_runs
from trl.reporting.run_events import EVENTS, events_in, parts_in
from trl.scripts.report import write_page

SAVES = {"save_strategy": "steps", "save_steps": 2}


def of(events, kind):
    return [event for event in events if event["event"] == kind]


def rows_of(folder, step):
    return pq.read_table(parts_in(folder)[step]).to_pylist()


def without_clocks(events):
    numbers = [(event["step"], event["values"]) for event in of(events, "log")]
    return [
        (step, {k: v for k, v in values.items() if not any(clock in k for clock in grpo_runs.CLOCKS)})
        for step, values in numbers
    ]


def test_a_run_and_its_resumed_rest_are_written_once(tmp_path):
    folder = str(tmp_path / "run")
    trainer, _ = grpo_runs.run(folder=folder, max_steps=3, **SAVES)
    first = list(events_in(tmp_path / "run"))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for event, entry in zip(of(first, "log"), logged, strict=False):
        assert event["values"] == {name: value for name, value in entry.items() if name != "step"}
    (start,) = of(first, "start")
    assert start["settings"]["beta"] == 0.1 and start["method"] == "GRPO" and start["data"]["rows"] == 14
    assert sum(count for count, _ in start["data"]["lengths"]) == 14
    assert set(of(first, "log")[0]["seconds"]) == {"rollouts and data", "training", "logging"}
    assert ["checkpoints" in event["seconds"] for event in of(first, "log")[:3]] == [False, False, True]  # after step 2
    rows = rows_of(tmp_path / "run", 3)
    batch = of(first, "rollouts")[2]
    rewards = [name for name, value in rows[0].items() if isinstance(value, float)]
    assert rewards == ["even_tokens", "advantage", "reward"] and batch["of"] == 8
    assert [float(f"{row['even_tokens']:.4g}") for row in rows] == batch["rewards"]
    assert [row["group"] for row in rows] == [0] * 4 + [1] * 4
    for row, length in zip(rows, batch["lengths"], strict=True):
        assert len(row["token_texts"]) == len(row["token_logps"]) == length and max(row["token_logps"]) < 0
    with (tmp_path / "run" / EVENTS).open("ab") as file:
        file.write(b'{"event": "log", "step": 4, "val')  # a kill
    grpo_runs.make(folder=folder, max_steps=3, **SAVES)[0].train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    again = list(events_in(tmp_path / "run"))
    assert without_clocks(again) == without_clocks(first)
    assert [event["step"] for event in of(again, "start")] == [0, 2]
    assert [event["step"] for event in of(again, "rollouts")] == [1, 2, 3] == list(parts_in(tmp_path / "run"))
    assert rows_of(tmp_path / "run", 3) == rows


@pytest.mark.parametrize("steps", [1, 2])
def test_entropies_are_those_of_the_policy(steps, tmp_path):
    settings = {"max_steps": steps, "logging_steps": steps, "steps_per_generation": steps}
    trainer, _ = grpo_runs.run(folder=str(tmp_path), learning_rate=0.0, temperature=0.7, **settings)
    rows = rows_of(tmp_path, steps)
    batch = trainer._rollout_batch
    shown = [at for at, row in enumerate(rows) if row["token_entropies"]]
    assert len(rows) == 8 * steps and len(shown) == 8  # those that the logged step learned from
    for at in shown:
        prompt, completion = batch.prompts.row(at), batch.completions.row(at)
        with torch.no_grad():
            logits = trainer.model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        wanted = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(
            torch.tensor(rows[at]["token_entropies"], dtype=torch.float64), wanted, atol=1e-10, rtol=0
        )
    mean = sum(sum(rows[at]["token_entropies"]) for at in shown) / sum(len(rows[at]["token_texts"]) for at in shown)
    assert trainer.state.log_history[0]["entropy"] == pytest.approx(mean, abs=1e-10)


def test_steps_of_ppo_are_written_and_go_on_after_a_loaded_state(tmp_path):
    run, state = tmp_path / "run", tmp_path / "state"
    options = {"project_kwargs": {"project_dir": str(run)}, "init_kl_coef": 0.1}
    trainer = ppo_runs.make_trainer(**options)
    stats = trainer.step(*ppo_runs.batch())
    trainer.save_state(state)
    for _ in range(2):
        trainer.step(*ppo_runs.batch())
    first = list(events_in(run))
    assert [event["step"] for event in of(first, "log")] == [1, 2, 3]
    log = of(first, "log")[0]
    assert log["values"] == {name: value for name, value in stats.items() if isinstance(value, int | float)}
    write_page([run], page := tmp_path / "page.html")
    assert "is going on, or was stopped, after step 3" in page.read_text() and '"objective/kl"' in page.read_text()
    trainer = ppo_runs.make_trainer(**options)
    trainer.load_state(state)
    trainer.step(*ppo_runs.batch())
    again = list(events_in(run))
    assert [event["step"] for event in of(again, "log")] == [1, 2]
    assert of(again, "log")[0] == log


def test_turns_of_tools_are_kept_as_messages(tmp_path):
    grpo_tool_runs.run(folder=str(tmp_path), max_steps=1)
    rows = rows_of(tmp_path, 1)
    messages = [json.loads(row["completion"]) for row in rows]
    assert all(row["chat_completion"] for row in rows) and {
        message["role"] for turns in messages for message in turns
    } >= {
        "assistant",
        "tool",
    }
    called = [
        row for row, turns in zip(rows, messages, strict=True) if turns[-1]["role"] != "assistant" or len(turns) > 1
    ]
    assert called and all(any(row["token_tool"]) for row in called)


@pytest.mark.parametrize("logs", [False, True])
def test_nothing_is_written_without_report(logs, tmp_path):
    grpo_runs.run(folder=str(tmp_path), max_steps=1, report=False, log_completions=logs)
    assert not (tmp_path / EVENTS).exists() and bool(parts_in(tmp_path)) == logs
