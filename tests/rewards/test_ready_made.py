"""The ready-made reward functions, and how a command line finds them."""

import os
import threading
import time

import pytest

from trl import rewards
from trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    ready_made,
    reasoning_accuracy_reward,
    resolve_reward_funcs,
    think_format_reward,
)
from trl.rewards.ready_made import MathProcess


def say(*contents):
    return [[{"role": "assistant", "content": content}] for content in contents]


# ---- accuracy

EQUAL = [
    (r"\boxed{\frac{63}{400}}", r"\frac{63}{400}"),
    (r"\boxed{\frac{63}{400}}", "63/400"),
    (r"So it is $\boxed{0.5}$.", "1/2"),
    (r"The final answer is $42$", "42"),
    (r"\boxed{x=42}", "42"),
    (r"\boxed{2\pi}", r"2 \pi"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{-\frac12}", "-0.5"),
    (r"\boxed{50\%}", "50%"),
    (r"\boxed{1} and \boxed{2}", "$1,2$"),
    (r"I get \boxed{1}. No, wait: \boxed{42}.", "42"),
    (r"\boxed{A}", "A"),
    (r"\boxed{(-\infty, 3]}", r"(-\infty,3]"),
    (r"\boxed{42}", "so it is that #### 42"),
]
UNEQUAL = [
    (r"\boxed{\frac{64}{400}}", "63/400"),
    (r"\boxed{2}", r"2 \pi"),  # 2 pi is not read as 2
    (r"\boxed{2}", "2x + 1"),
    (r"\boxed{42}. No, wait: \boxed{41}", "42"),
    ("42", "42"),  # no box, and no LaTeX behind words that announce an answer
    (r"\boxed{42", "42"),
    ("", "42"),
    (r"\boxed{B}", "A"),
    ("\\boxed{" * 300, "42"),
]


@pytest.mark.parametrize("as_messages", [True, False])
def test_accuracy(as_messages):
    pairs = EQUAL + UNEQUAL
    answers = [answer for answer, _ in pairs]
    found = accuracy_reward(say(*answers) if as_messages else answers, [gold for _, gold in pairs])
    assert dict(zip(pairs, found, strict=True)) == dict.fromkeys(EQUAL, 1.0) | dict.fromkeys(UNEQUAL, 0.0)
    assert {type(value) for value in found} == {float}


def test_a_solution_that_cannot_be_read_gives_no_opinion():
    assert accuracy_reward(say(r"\boxed{42}", r"\boxed{42}"), ["Answer is forty two.", "42"]) == [None, 1.0]
    assert reasoning_accuracy_reward(say(r"</think>\boxed{42}"), ["Answer is forty two."]) == [None]


def test_accuracy_behind_reasoning():
    right, wrong = r"\boxed{\frac{63}{400}}", r"\boxed{\frac{64}{400}}"
    completions = say(
        f"<think> {wrong} </think> {right}",
        f"thinking </think> {right}",
        f"<think> {right} </think> {wrong}",
        f"<think> {right}",
        f"<think> one </think> {right} <think> two </think>",
    )
    gold = ["63/400"] * 5
    assert reasoning_accuracy_reward(completions, gold) == [1.0, 1.0, 0.0, 0.0, 0.0]
    other = say(f"thought|end| {right}", f"thought</think> {right}", f"a|end| b|stop| {right}")
    found = reasoning_accuracy_reward(other, gold[:3], reasoning_delimiters=["|end|", "|stop|"])
    assert found == [1.0, 0.0, 1.0]


def test_accuracy_works_in_any_thread_at_the_same_time():
    found = {}

    def ask(number):
        found[number] = accuracy_reward([rf"\boxed{{{n}}}" for n in range(10)], [str(number)] * 10)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [float(n == number) for n in range(10)] for number in range(6)}


def test_an_answer_that_takes_too_long_counts_as_wrong_and_the_next_one_is_compared(monkeypatch):
    monkeypatch.setattr(ready_made, "SECONDS_EACH", 1.0)
    process = MathProcess()
    try:
        started = time.monotonic()
        assert process.is_equal("7", r"\boxed{9^{9^{9^{9}}}}") is False
        assert time.monotonic() - started < 30
        assert process.ended == 1
        monkeypatch.setattr(ready_made, "SECONDS_EACH", 30.0)
        assert process.is_equal("7", r"\boxed{7}") is True
    finally:
        process.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_compares_for_itself():
    assert accuracy_reward([r"\boxed{1}"], ["1"]) == [1.0]
    child = os.fork()
    if child == 0:
        status = 0 if accuracy_reward([r"\boxed{2}", r"\boxed{3}"], ["2", "2"]) == [1.0, 0.0] else 1
        ready_made.MATH.close()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert accuracy_reward([r"\boxed{1}"], ["1"]) == [1.0]


def test_without_math_verify_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(ready_made, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'trl\[math\]'"):
        MathProcess().is_equal("1", r"\boxed{1}")


# ---- form and length


def test_think_format():
    good = (
        "<think>Look up.</think>Blue.",
        "<think>\nLook\nup.\n</think>\nBlue.",
        "<think></think>Blue.",
        "<think>Look <b>up</b>.</think>",
    )
    bad = (
        "Blue.",
        "<think>Look up.",
        "Look up.</think>Blue.",
        "Well, <think>look up.</think>Blue.",
        "<think>Look <think>up</think></think>Blue.",
        "<think>Look up.</think>Blue. <think>Or grey?</think>",
        "<Think>Look up.</Think>Blue.",
        "",
    )
    assert think_format_reward(say(*good)) == [1.0] * 4
    assert think_format_reward(list(bad), prompts=["ignored"]) == [0.0] * 8


def test_soft_overlong_punishment():
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    ids = [[1] * length for length in (0, 80, 81, 90, 99, 100, 101, 1000)]
    assert punish(completion_ids=ids, prompts=[]) == [0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0, -1.0]
    assert punish.__name__ == "soft_overlong_punishment_reward"
    for cache in (0, 101):
        with pytest.raises(ValueError, match="soft_punish_cache must be between 1 and max_completion_len=100"):
            get_soft_overlong_punishment(100, cache)


# ---- by name


def test_names_of_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "graders_of_mine.py").write_text(
        "SIZE = 3\nclass Grader: pass\ndef length(completions, **kwargs):\n    return [1.0]\n"
    )
    (tmp_path / "needs_more.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    names = ["accuracy_reward", "graders_of_mine.length", "model", "./model", "owner/name", "math.fsum"]
    found = resolve_reward_funcs(names)
    assert found[0] is rewards.accuracy_reward
    assert found[1](completions=[]) == [1.0]
    assert found[2:5] == ["model", "./model", "owner/name"]
    given, swapped, default, by_place = resolve_reward_funcs(
        [
            "get_soft_overlong_punishment(max_completion_len=10,soft_punish_cache=4)",
            "get_soft_overlong_punishment(soft_punish_cache=4, max_completion_len=10)",
            "get_soft_overlong_punishment",
            "get_soft_overlong_punishment(10, 4)",
        ]
    )
    assert [punish(completion_ids=[[0] * 8]) for punish in (given, swapped, by_place)] == [[-0.5]] * 3
    assert default(completion_ids=[[0] * 1024, [0] * 1280]) == [0.0, -1.0]
    for name, message in {
        "acuracy_reward": r"'acuracy_reward' is unknown. Did you mean accuracy_reward\? Known are accuracy_reward, reasoning",
        "trl.rewards.acuracy": "'trl.rewards.acuracy' is no function, and no class of a judge. Module 'trl.rewards' has",
        "graders_of_mine.SIZE": r"no function.* has \['Grader', 'length'\]",
        "graders_of_mine.Grader": "is no function, and no class of a judge",
        "nowhere.length": "There is no module 'nowhere' here .* or installed. Known are",
        "./nowhere": "There is no such folder",
        "examples/scores.py": "is a file. Name a function in it",
        "./scores.py:length": "is a file",
        "get_soft_overlong_punishment(3)": "cannot be read",
        "get_soft_overlong_punishment(max_completion_len=__import__('os'))": "cannot be read",
    }.items():
        with pytest.raises(ValueError, match=message):
            resolve_reward_funcs([name])
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        resolve_reward_funcs(["needs_more.length"])
