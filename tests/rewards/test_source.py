"""Sources together: the one contract of all kinds, weights, None, deadlines, failures, and answers that are no rewards."""

import asyncio
import functools
import gc
import logging
import math
import sys
import threading
import time

import numpy as np
import pytest
import torch

from trl.reporting import deadlines
from trl.rewards import FunctionSource, RewardError, RewardInputs, RewardSources
from trl.rewards.source import MOST_LEFT_BEHIND

INPUTS = RewardInputs(
    prompts=["Is the sky", "Is the sky", "An apple"],
    completions=[" blue?", " a sea?", " falls"],
    completion_ids=[[5, 6], [5, 6, 7], [8]],
    columns={"answer": ["yes", "no", "down"]},
    trainer_state="state",
)


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


async def async_length(completions, **kwargs):
    await asyncio.sleep(0.001)
    return [float(len(text)) for text in completions]


class Judge:
    def __call__(self, completions, **kwargs):
        return [float(len(text)) for text in completions]

    def method(self, completions, **kwargs):
        return self(completions)


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        return await async_length(completions)


def scores_of(function, *, inputs=INPUTS, **options):
    return RewardSources(function, **options).score(inputs).scores


LENGTHS = [[6.0], [7.0], [6.0]]

# kind -> what makes it, and its name
KINDS = {
    "function": (lambda: length, "length"),
    "async": (lambda: async_length, "async_length"),
    "partial": (lambda: functools.partial(length, extra=1), "length"),
    "async partial": (lambda: functools.partial(async_length, extra=1), "async_length"),
    "lambda": (lambda: lambda completions: [float(len(text)) for text in completions], "<lambda>"),
    "lambda around async": (lambda: lambda **kwargs: async_length(**kwargs), "<lambda>"),
    "object": (Judge, "Judge"),
    "async object": (AsyncJudge, "AsyncJudge"),
    "method": (lambda: Judge().method, "method"),
    "source": (lambda: FunctionSource(length, name="own name"), "own name"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deadline", [None, 30.0])
def test_every_kind_of_function_gives_its_scores_under_its_name(kind, deadline):
    make, name = KINDS[kind]
    sources = RewardSources(make(), deadline=deadline)
    result = sources.score(INPUTS)
    assert result.scores.tolist() == LENGTHS
    assert result.names == (name,)


def test_functions_are_called_as_documented_and_keep_nothing():
    seen = {}

    def recorder(prompts, completions, completion_ids, trainer_state, **kwargs):
        seen.update(kwargs, prompts=list(prompts), ids=completion_ids, state=trainer_state)
        prompts.clear()
        completions.reverse()
        return [0.0] * 3

    assert scores_of([recorder, length])[:, 1].tolist() == [6.0, 7.0, 6.0]
    assert seen == {"answer": ["yes", "no", "down"], "prompts": INPUTS.prompts, "ids": INPUTS.completion_ids, "state": "state"}  # fmt: skip


def test_what_a_function_changes_in_messages_and_columns_the_next_one_does_not_see():
    said = [[{"role": "assistant", "content": " blue?"}], [{"role": "assistant", "content": " a sea?"}]]
    inputs = RewardInputs(
        ["Is the sky"] * 2, said, completion_ids=[[5], [6]], columns={"info": [{"tags": ["a"]}, {"tags": []}]}
    )
    seen = []

    def strips(completions, completion_ids, info, **kwargs):
        seen.append([completions[0][0]["content"], list(completion_ids[0]), list(info[0]["tags"])])
        completions[0][0]["content"] = completions[0][0]["content"].strip()
        completion_ids[0].append(9)
        info[0]["tags"].clear()
        return [0.0] * 2

    scores_of([strips, strips], inputs=inputs)
    assert seen == [[" blue?", [5], ["a"]]] * 2 and said[0][0]["content"] == " blue?"


def test_a_column_that_is_missing_is_named_before_the_first_step():
    def needs_more(completions, gold, **kwargs):
        return [0.0]

    with pytest.raises(ValueError, match=r"'needs_more' needs \['gold'\], the data set has the columns \['answer'\]"):
        RewardSources(needs_more).check_columns(["answer"])
    with pytest.raises(TypeError, match="must take keyword arguments"):
        RewardSources(lambda completions, /: [0.0])
    with pytest.raises(TypeError, match=r"must take keyword arguments. Write it as `def f"):
        RewardSources(lambda: [0.0])


def test_weights_none_and_counts():
    def sometimes(completions, **kwargs):
        return [None, 2, np.float32(0.5)]

    def never(completions, **kwargs):
        return [None, None, torch.tensor(4.0)]

    result = RewardSources([sometimes, never, sometimes], weights=[2.0, 0.25, 0.0]).score(INPUTS)
    assert result.names == ("sometimes", "never", "sometimes_2")
    assert result.scores.isnan().tolist() == [[True] * 3, [False, True, False], [False] * 3]
    assert result.rewards.tolist()[1:] == [4.0, 2 * 0.5 + 0.25 * 4.0]
    assert math.isnan(result.rewards[0])
    assert result.unscored.tolist() == [True, False, False]
    assert result.nones == {"sometimes": 1, "never": 2, "sometimes_2": 1}
    assert result.failures == {"sometimes": 0, "never": 0, "sometimes_2": 0}
    metrics = result.metrics()
    assert metrics["rewards/sometimes/mean"] == 1.25
    assert metrics["rewards/sometimes/std"] == pytest.approx(1.5 / math.sqrt(2))
    assert metrics["rewards/never/mean"] == 4.0
    assert math.isnan(metrics["rewards/never/std"])


def test_rows_without_any_opinion_are_said_once(caplog):
    sources = RewardSources([lambda completions: [None, 1.0, None]])
    with caplog.at_level(logging.WARNING):
        results = [sources.score(INPUTS) for _ in range(2)]
    assert [int(result.unscored.sum()) for result in results] == [2, 2]
    assert len(caplog.records) == 1
    assert "2 of 3 rollouts got no reward" in caplog.text
    assert "'Is the sky' -> ' blue?'" in caplog.text


@pytest.mark.parametrize("lost", [[False, True, False], [True] * 3])
def test_functions_are_not_given_lost_rows_also_beside_other_sources(lost, caplog):
    class Every:
        name, is_async, deadline, on_failure = "every", False, None, None

        def check_columns(self, columns):
            pass

        def score(self, inputs):
            return [1.0] * len(inputs)

    def function(completions, **kwargs):
        seen.append(len(completions))
        return length(completions)

    async def async_function(completions, **kwargs):
        return function(completions)

    seen, kept = [], len(lost) - sum(lost)
    sources = RewardSources([function, Every(), async_function])
    scores = sources.score(INPUTS, lost=torch.tensor(lost)).scores
    assert seen == [kept] * 2 * (kept > 0) and not caplog.records
    expected = [[math.nan] * 3 if gone else [own, 1.0, own] for gone, (own,) in zip(lost, LENGTHS, strict=True)]
    torch.testing.assert_close(scores, torch.tensor(expected).double(), equal_nan=True)


# ---- what is no reward

BAD_ANSWERS = {
    "too few": ([1.0, 2.0], "gave 2 values, expected 3"),
    "too many": ([1.0] * 4, "gave 4 values, expected 3"),
    "strings": ([1.0, "0.5", 2.0], r"gave '0.5' \(a str\) for row 1 \('Is the sky' -> ' a sea\?'\)"),
    "nan": ([1.0, 2.0, math.nan], r"gave nan for row 2 .*, or None for no score"),
    "infinity": ([-math.inf, 2.0, 1.0], "gave -inf for row 0"),
    "beyond float32": ([1e300, 2.0, 1.0], "gave 1e[+]300 .beyond float32. for row 0"),
    "beyond floats": ([10**400, 2.0, 1.0], "gave inf for row 0"),
    "nothing": (None, "gave None .*return statement.*expected a list of 3 numbers"),
    "one number": (1.0, "gave a float, expected a list of 3 numbers"),
    "a dict": ({"a": 1.0}, "gave a dict"),
    "a column": (torch.zeros(3, 1), r"a tensor of shape \(3, 1\), expected \(3,\)"),
    "a table": (np.zeros((3, 2)), r"a tensor of shape \(3, 2\)"),
    "lists": ([[1.0], [2.0], [3.0]], r"gave \[1.0\] \(a list\) for row 0"),
    "complex": ([1j, 2.0, 3.0], r"gave 1j \(a complex\)"),
    "tensor of nan": (torch.tensor([0.0, math.nan, 1.0]), "gave nan for row 1"),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_what_is_no_reward_is_named_with_source_and_row(case):
    answer, message = BAD_ANSWERS[case]

    def grader(completions, **kwargs):
        return answer

    with pytest.raises(RewardError, match=f"Reward source 'grader' .*{message}"):
        RewardSources(grader).score(INPUTS)


@pytest.mark.parametrize(
    "answer",
    [
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        torch.tensor([1, 2, 3], dtype=torch.int16),
        torch.tensor([1.0, 2.0, 3.0]).bfloat16(),
        np.array([1.0, 2.0, 3.0]),
        (1, 2, 3),
        [torch.tensor([1.0]), np.int64(2), 3],
    ],
    ids=["with gradient", "int16", "bfloat16", "array", "tuple", "mixed"],
)
def test_numbers_in_any_form_are_taken(answer):
    assert scores_of(lambda completions: answer)[:, 0].tolist() == [1.0, 2.0, 3.0]


# ---- failures and deadlines


def raising(completions, **kwargs):
    raise KeyError("no such thing")


def test_a_source_that_raises_ends_the_run_or_is_skipped(caplog):
    with pytest.raises(RewardError, match="'raising' raised KeyError: 'no such thing'") as caught:
        RewardSources(raising).score(INPUTS)
    assert isinstance(caught.value.__cause__, KeyError)
    sources = RewardSources([raising, length], on_failure="skip")
    with caplog.at_level(logging.WARNING):
        results = [sources.score(INPUTS) for _ in range(2)]
    assert [result.failures for result in results] == [{"raising": 3, "length": 0}] * 2
    assert results[0].nones == {"raising": 0, "length": 0}
    assert results[0].rewards.tolist() == [6.0, 7.0, 6.0]
    assert len(caplog.records) == 1
    assert "no such thing" in caplog.text


def leaving(completions, **kwargs):
    sys.exit(3)


async def async_leaving(completions, **kwargs):
    sys.exit(3)


@pytest.mark.parametrize("source", [leaving, async_leaving])
@pytest.mark.parametrize("deadline", [None, 30.0])
def test_sys_exit_is_an_error_of_the_reward(source, deadline):
    with pytest.raises(RewardError, match=rf"'{source.__name__}' called sys.exit\(3\), which does not end a run"):
        RewardSources(source, deadline=deadline).score(INPUTS)
    sources = RewardSources([source, length], on_failure="skip", deadline=deadline)
    assert sources.score(INPUTS).rewards.tolist() == [6.0, 7.0, 6.0]


def test_the_exit_that_a_signal_asks_for_passes():
    class Terminated(SystemExit):
        pass

    def interrupted(completions, **kwargs):
        raise Terminated

    with pytest.raises(Terminated):
        RewardSources(interrupted, on_failure="skip").score(INPUTS)


def test_a_source_has_a_policy_and_a_deadline_of_its_own():
    release = threading.Event()

    def hanging(completions, **kwargs):
        release.wait(30)
        return [0.0] * 3

    lenient = FunctionSource(hanging, deadline=0.05, on_failure="skip")
    started = time.monotonic()
    assert RewardSources([lenient, length]).score(INPUTS).rewards.tolist() == [6.0, 7.0, 6.0]
    assert time.monotonic() - started < 20
    with pytest.raises(RewardError, match=r"'hanging' did not answer within 0.05 s .*in hanging|in wait"):
        RewardSources(hanging, deadline=0.05).score(INPUTS)
    release.set()


def test_threads_that_cannot_be_stopped_are_named_and_do_not_pile_up():
    release = threading.Event()

    def stuck(completions, **kwargs):  # a name that no other test's threads have
        release.wait(30)

    sources = RewardSources(stuck, deadline=0.01, on_failure="skip")
    with pytest.raises(RewardError, match=r"Its thread 'reward-stuck-[0-9]+' cannot be stopped"):
        RewardSources(stuck, deadline=0.01).score(INPUTS)
    for _ in range(MOST_LEFT_BEHIND + 3):
        assert sources.score(INPUTS).failures == {"stuck": 3}
    alive = [thread for thread in threading.enumerate() if thread.name.startswith("reward-stuck-")]
    assert len(alive) == MOST_LEFT_BEHIND + 1
    release.set()
    for thread in alive:
        thread.join(10)
    assert not any(thread.is_alive() for thread in alive)


def test_async_sources_run_at_the_same_time_on_one_loop(monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    loops, running, most = set(), 0, 0

    def judge(number):
        async def ask(completions, **kwargs):
            nonlocal running, most
            loops.add(asyncio.get_running_loop())
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            return [float(number)] * len(completions)

        return ask

    before = set(threading.enumerate())
    sources = RewardSources([judge(0), length, judge(1), judge(2)])
    for _ in range(2):
        assert sources.score(INPUTS).scores[0].tolist() == [0.0, 6.0, 1.0, 2.0]
    assert most == 3
    (loop,) = loops  # kept from call to call
    (thread,) = (x for x in set(threading.enumerate()) - before if x.name.startswith("reward-event-loop"))
    del sources
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and loop.is_closed() and not errors


def test_an_async_source_past_its_deadline_is_cancelled():
    cancelled = threading.Event()

    async def slow(completions, **kwargs):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(RewardError, match=r"'slow' did not answer within 0\.05 s and was cancelled"):
        RewardSources([slow, async_length], deadline=0.05).score(INPUTS)
    assert cancelled.wait(20)


def test_an_error_cancels_the_async_sources_that_still_run():
    cancelled = threading.Event()

    async def slow(completions, **kwargs):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def raising_later(completions, **kwargs):
        time.sleep(0.05)
        raise ValueError("broken")

    with pytest.raises(RewardError, match="broken"):
        RewardSources([slow, raising_later]).score(INPUTS)
    assert cancelled.wait(20)


def test_an_async_source_that_blocks_its_loop_is_left_behind(monkeypatch):
    monkeypatch.setattr(deadlines, "GRACE_SECONDS", 0.05)
    release = threading.Event()

    async def blocking(completions, **kwargs):
        release.wait(30)
        return [0.0] * 3

    sources = RewardSources([blocking, async_length], deadline=0.05, on_failure="skip")
    assert sources.score(INPUTS).failures["blocking"] == 3
    with pytest.raises(RewardError, match=r"blocks its event loop .*Its thread 'reward-event-loop-"):
        RewardSources(blocking, deadline=0.05).score(INPUTS)
    release.set()


def test_threads_share_one_loop_and_are_limited(monkeypatch):
    make, made, running, most = asyncio.new_event_loop, [], [], []

    def slowly():
        time.sleep(0.05)
        made.append(make())
        return made[-1]

    async def answer():
        return asyncio.get_running_loop()

    def call(number):
        running.append(number)
        most.append(len(running))
        found = calls.outcome(calls.submit(answer(), 10))
        running.remove(number)
        return threading.current_thread().daemon, found, number

    monkeypatch.setattr(asyncio, "new_event_loop", slowly)
    calls = deadlines.AsyncCalls("reward")
    found = list(deadlines.DaemonThreads(2).map(call, range(6)))
    assert found == [(True, made[0], number) for number in range(6)] and len(made) == 1 and max(most) == 2


# ---- what cannot work


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="reward_weights has 1 weights for 2 reward functions"):
        RewardSources([length, length], weights=[1.0])
    with pytest.raises(ValueError, match="must be finite"):
        RewardSources([length], weights=[math.nan])
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        RewardSources([])
    with pytest.raises(TypeError, match="reward_funcs holds a int"):
        RewardSources([3])
    with pytest.raises(TypeError, match=r"the class Judge. Make one: Judge\(\)"):
        RewardSources([Judge])
    with pytest.raises(ValueError, match="reward_processing_classes has 1 entries for 2"):
        RewardSources([length, length], processing_classes=[None])
    with pytest.raises(ValueError, match="reward_deadline must be > 0"):
        RewardSources(length, deadline=0.0)
    with pytest.raises(ValueError, match="reward_failure must be one of 'error', 'skip', got 'ignore'"):
        RewardSources(FunctionSource(length, on_failure="ignore"))
    with pytest.raises(ValueError, match=r"columns \['completions'\]"):
        RewardInputs(["a"], ["b"], columns={"completions": ["c"]})
    with pytest.raises(ValueError, match="completions has 2 values, expected 1"):
        RewardInputs(["a"], ["b", "c"])
    with pytest.raises(ValueError, match="column 'gold' has 0 values, expected 1"):
        RewardInputs(["a"], ["b"], columns={"gold": []})
