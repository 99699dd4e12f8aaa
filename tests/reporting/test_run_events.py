"""`run.jsonl` and the files of completions: what is cut when a run goes on, and what a full disk does."""

import json

import pytest

from trl.reporting.run_checks import WINDOW, RunChecks, text_signs
from trl.reporting.run_events import EVENTS, RunEvents, events_in, parts_in, read_part

CALM = {
    "reward": 0.4, "kl": 0.02, "objective/kl": 3.0, "clip_ratio/region_mean": 0.02, "completions/clipped_ratio": 0.1,
    "frac_reward_zero_std": 0.2, "sampling/sampling_logp_difference/mean": 0.01, "entropy": 1.5,
    "completions/mean_length": 50.0, "repeated": 0.0, "equal": 0.0,
}  # fmt: skip
FACTS = {"repeated": 0.0, "equal": 0.0}
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
    "longer answers": {"completions/mean_length": 120.0, "reward": 0.6},
    "shorter answers": {"completions/mean_length": 10.0, "reward": 0.6},
}


def written(folder, steps, run="a", start=0):
    events = RunEvents(folder, run, step=start)
    events.write("start", start, run=run)
    for step in range(start + 1, steps + 1):
        events.write_rollouts(step, FACTS, {"prompt": [f"<{step}>"], "good": [0.5]}, ["good"])
        events.write("log", step, values={"loss": 1 - step / 10})
    events.close()
    return [event["step"] for event in events_in(folder) if event["event"] == "log"]


def test_a_run_that_goes_on_has_no_doubles_after_a_kill_in_the_middle_of_a_line(tmp_path):
    assert written(tmp_path, 5) == [1, 2, 3, 4, 5]
    assert read_part(parts_in(tmp_path)[2]) == ([{"prompt": "<2>", "good": 0.5}], ["good"])
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


def test_an_infinite_divergence_is_a_sign():
    checks = RunChecks()
    signs = [checks.read({"reward": 0.5, "kl": float("inf") if step > 4 else 0.01}) for step in range(9)]
    assert [[*sign] for sign in signs if sign] == [["KL"]]


def test_a_run_goes_on_where_nothing_can_be_written(tmp_path, caplog):
    (tmp_path / "file").touch()
    events = RunEvents(tmp_path / "file", "a", step=0)
    events.write("log", 1, values={})
    events.write_rollouts(1, FACTS, {"prompt": ["a"]}, [])
    assert "cannot be written" in caplog.text and not (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_once_and_alone(fault):
    logs = [{**CALM, "step": step} for step in range(WINDOW)] + [{**CALM, **PLANTED[fault]}] * (2 * WINDOW)
    checks = RunChecks()
    assert [list(faults) for entry in logs if (faults := checks.read(entry))] == [[fault]]
    assert RunChecks([fault]).fired == {fault} and not any(map(RunChecks([fault]).read, logs))


TRAINED = {"loss": 1.0, "grad_norm": 2.0, "rewards/chosen": 0.1, "rewards/margins": 0.2, "rewards/accuracies": 0.7}
PLANTED_IN_TRAINING = {
    "not a number": [{"loss": float("nan")}],
    "gradient spike": [{"grad_norm": 21.0}],
    "rising loss": [{"loss": 1.3}] * WINDOW,
    "accuracy of a coin": [{"rewards/accuracies": 0.51}] * 17,
    "likelihood displacement": [{"rewards/chosen": -1.2, "rewards/margins": 0.3}] * WINDOW,
}


@pytest.mark.parametrize("fault", PLANTED_IN_TRAINING)
def test_a_fault_of_a_run_without_rewards_is_named_once_and_alone(fault):
    checks, logs = RunChecks(), [TRAINED] * 12 + [{**TRAINED, **planted} for planted in PLANTED_IN_TRAINING[fault]]
    *calm, shown = [checks.read(entry) for entry in logs]
    assert not any(calm) and list(shown) == [fault] and "{" not in shown[fault]
    assert not checks.read(logs[-1])


@pytest.mark.parametrize(
    ("train", "evaluation", "faults"),
    [
        ([1.0, 0.8, 0.6], [1.0, 0.9, 0.97], ["overfitting"]),
        ([1.0, 0.8, 0.6], [1.0, 0.9, 0.93], []),
        ([1.0, 0.8, 0.8], [1.0, 0.9, 1.2], []),  # the loss of training does not fall
    ],
)
def test_overfitting_needs_a_falling_and_a_rising_loss(train, evaluation, faults):
    checks = RunChecks()
    for loss, eval_loss in zip(train, evaluation, strict=True):
        shown = [*(checks.read({"loss": loss}) for _ in range(WINDOW)), checks.read({"eval_loss": eval_loss})]
    assert [name for entry in shown for name in entry] == faults


def test_a_calm_run_and_one_without_rewards_show_nothing():
    wave = [{**CALM, "entropy": 1.5 - 0.01 * n, "reward": 0.4 + 0.01 * n} for n in range(30)]
    supervised = [{"loss": 1.0, "entropy": 3.0 / (n + 1) ** 2} for n in range(30)]
    for logs in (wave, supervised):
        assert not any(map(RunChecks().read, logs))


def test_repeated_and_equal_texts_are_counted():
    long = " ".join(f"word{n}" for n in range(30))
    loop = "again and again " * 20
    assert text_signs(["a", "b", "c", "d"], [long, long, loop, "yes"]) == {"repeated": 0.25, "equal": 0.5}
    assert text_signs(["a", "b"], ["yes", "yes"]) == {"repeated": 0.0, "equal": 0.0}
    assert json.dumps(text_signs([], [])) == '{"repeated": 0.0, "equal": 0.0}'
