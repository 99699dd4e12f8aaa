"""`run.jsonl` and the files of completions: what is cut when a run goes on, and what a full disk does."""

import json

import pyarrow.parquet as pq
import pytest

from trl.reporting.run_checks import USUAL, WINDOW, signs_of, text_signs
from trl.reporting.run_events import EVENTS, RunEvents, events_in, parts_in

CALM = {
    "reward": 0.4, "kl": 0.02, "objective/kl": 3.0, "clip_ratio/region_mean": 0.02, "completions/clipped_ratio": 0.1,
    "frac_reward_zero_std": 0.2, "sampling/sampling_logp_difference/mean": 0.01, "entropy": 1.5,
    "completions/mean_length": 50.0, "repeated": 0.0, "equal": 0.0,
}  # fmt: skip
# What is planted in the later logs, and the fault that it is.
PLANTED = {
    "KL": {"kl": 1.5},
    "clipped updates": {"clip_ratio/region_mean": 0.4},
    "cut answers": {"completions/clipped_ratio": 0.7},
    "groups without variance": {"frac_reward_zero_std": 0.9},
    "stale rows": {"sampling/sampling_logp_difference/mean": 0.3},
    "repeated text": {"repeated": 0.4},
    "equal answers": {"equal": 0.6},
    "entropy collapse": {"entropy": 0.2},
    "answer length: longer": {"completions/mean_length": 120.0, "reward": 0.6},
    "answer length: shorter": {"completions/mean_length": 10.0, "reward": 0.6},
}


def written(folder, steps, run="a", start=0):
    events = RunEvents(folder, run, step=start)
    events.write("start", start, run=run)
    for step in range(start + 1, steps + 1):
        events.write_part(folder, step, {"prompt": [f"<{step}>"], "good": [0.5]})
        events.write("rollouts", step)
        events.write("log", step, values={"loss": 1 - step / 10})
    events.close()
    return [event["step"] for event in events_in(folder) if event["event"] == "log"]


def test_a_run_that_goes_on_has_no_doubles_after_a_kill_in_the_middle_of_a_line(tmp_path):
    assert written(tmp_path, 5) == [1, 2, 3, 4, 5]
    assert pq.read_table(parts_in(tmp_path)[2]).to_pylist() == [{"prompt": "<2>", "good": 0.5}]
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"event": "log", "step": 6, "val')
    (tmp_path / "completions" / "completions_00006.new").write_bytes(b"PAR1")
    assert [event["step"] for event in events_in(tmp_path)] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert written(tmp_path, 7, start=3) == [1, 2, 3, 4, 5, 6, 7]
    assert list(parts_in(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]
    starts = [event["step"] for event in events_in(tmp_path) if event["event"] == "start"]
    assert starts == [0, 3]


@pytest.mark.parametrize("start", [0, 3])
def test_another_run_replaces_what_an_earlier_one_wrote(start, tmp_path):
    written(tmp_path, 5)
    assert written(tmp_path, start + 1, run="b", start=start) == [start + 1]
    assert list(parts_in(tmp_path)) == [start + 1]


def test_a_torn_line_and_other_files_are_left_out(tmp_path):
    written(tmp_path, 3)
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"event": "log", "st{"event": "log"}\n')
    (tmp_path / "completions").mkdir(exist_ok=True)
    for name in ("backup", "old2"):
        (tmp_path / "completions" / f"completions_{name}.parquet").touch()
    before = events_in(tmp_path)
    assert [event["step"] for event in before if event["event"] == "log"] == [*parts_in(tmp_path)] == [1, 2, 3]
    RunEvents(tmp_path, "a", step=3).close()
    assert events_in(tmp_path) == before and b"st{" not in (tmp_path / EVENTS).read_bytes()


def test_a_run_goes_on_where_nothing_can_be_written(tmp_path, caplog):
    (tmp_path / "file").touch()
    events = RunEvents(tmp_path / "file", "a", step=0)
    events.write("log", 1, values={})
    assert not events.is_active
    events.write_part(tmp_path / "file", 1, {"prompt": ["a"]})
    assert caplog.text.count("cannot be written") == 2 and not (tmp_path / "file").read_bytes()


def signs(logs, of_texts=None):
    """The signs of logs, each in a step of its own: names and the steps at which they are seen first."""
    events = [{"event": "check", "step": 1, "name": "KL", "text": "as runs wrote it before"}]
    for step, values in enumerate(logs, 1):
        texts = {name: values[name] for name in ("repeated", "equal") if name in values}
        events += [{"event": "rollouts", "step": step, **texts}] * bool(texts)
        events.append({"event": "log", "step": step, "values": {k: v for k, v in values.items() if k not in texts}})
    shown = signs_of(events)
    assert not any("{" in sign.text for sign in shown)
    return [(sign.name, sign.step) for sign in shown]


def test_an_infinite_divergence_is_a_sign():
    assert signs([{"reward": 0.5, "kl": float("inf") if step > 4 else 0.01} for step in range(1, 9)]) == [("KL", 5)]


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_once_and_alone(fault):
    ((name, step),) = signs([CALM] * WINDOW + [{**CALM, **PLANTED[fault]}] * (2 * WINDOW))
    assert name == fault.split(":")[0] and WINDOW < step <= 2 * WINDOW


TRAINED = {"loss": 1.0, "grad_norm": 2.0, "rewards/chosen": 0.1, "rewards/margins": 0.2, "rewards/accuracies": 0.7}
PLANTED_IN_TRAINING = {
    "not a number": [{"loss": float("nan")}],
    "gradient spike": [{"grad_norm": 21.0}],
    "rising loss": [{"loss": 1.3}] * WINDOW,
    "accuracy of a coin": [{"rewards/accuracies": 0.51}] * 16,
    "overfitting": [{"eval_loss": 1.0}, {"eval_loss": 0.9}, {"eval_loss": 0.94}, {"eval_loss": 0.95}],
    "likelihood displacement": [{"rewards/chosen": -1.2, "rewards/margins": 0.3}] * WINDOW,
}


@pytest.mark.parametrize("fault", PLANTED_IN_TRAINING)
def test_a_fault_of_a_run_without_rewards_is_named_once_and_alone(fault):
    planted = PLANTED_IN_TRAINING[fault]
    logs = [TRAINED] * 12 + [values if "eval_loss" in values else {**TRAINED, **values} for values in planted]
    assert signs(logs) == signs([*logs, logs[-1]]) == [(fault, len(logs))]


def test_names_of_other_methods_and_rising_losses_below_zero():
    assert signs([{"objective/scores": 1.0, "policy/clipfrac_avg": 0.4}] * WINDOW) == [("clipped updates", WINDOW)]
    assert signs([{"accuracy": 0.5}] * USUAL) == [("accuracy of a coin", USUAL)]
    assert not signs([{"loss": -1.0 - 0.01 * n, "eval_loss": -1.0} for n in range(9)])
    assert signs([{"loss": -1.0 + 0.1 * n} for n in range(9)]) == [("rising loss", 5)]


def test_a_calm_run_and_one_without_rewards_show_nothing():
    wave = [{**CALM, "entropy": 1.5 - 0.01 * n, "reward": 0.4 + 0.01 * n} for n in range(30)]
    supervised = [{"loss": 1.0, "entropy": 3.0 / (n + 1) ** 2} for n in range(30)]
    for logs in (wave, supervised):
        assert not signs(logs)


def test_repeated_and_equal_texts_are_counted():
    long = " ".join(f"word{n}" for n in range(30))
    loop = "again and again " * 20
    assert text_signs([*zip("abcd", [long, long, loop, "yes"], strict=True)]) == {"repeated": 0.25, "equal": 0.5}
    assert text_signs([("a", "yes"), ("b", "yes")]) == {"repeated": 0.0, "equal": 0.0}
    assert json.dumps(text_signs([])) == '{"repeated": 0.0, "equal": 0.0}'
