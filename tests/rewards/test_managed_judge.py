"""A judge within a run: answers on disk, both orders, further attempts, deadlines, budgets and costs."""

import json
import logging
import threading
from multiprocessing import get_context

import pytest

from tests.rewards.judges_for_tests import Longer
from trl.experimental.judges import BasePairwiseJudge, OpenAIPairwiseJudge
from trl.reporting.win_rate import shares_of_first
from trl.rewards import JudgeSource, ManagedJudge, RewardInputs, RewardSources

PROMPTS = ["p", "q", "r"]
PAIRS = [["aa", "b"], ["a", "bb"], ["aa", "bb"]]  # the first, the second, and no answer of `Longer`


class First(BasePairwiseJudge):
    """Prefers what is shown first, except in answer to "q", where it prefers "bb"; no answer to "?"."""

    def __init__(self, fails=0, waits=None):
        self.asked, self.fails, self.waits, self.num_tokens = [], fails, waits, 0

    def judge(self, prompts, completions, shuffle_order=True):
        self.asked += list(zip(prompts, completions, strict=True))
        self.num_tokens += 10 * len(prompts)
        if self.fails:
            self.fails -= 1
            if self.waits is not None:
                self.waits.wait()
            raise ConnectionError("gone")
        return [
            -1 if prompt == "?" else int(prompt == "q" and pair[1] == "bb")
            for prompt, pair in zip(prompts, completions, strict=True)
        ]


def test_answers_are_kept_on_disk(tmp_path):
    """Another run asks only what had no answer; another prompt, order or judge is another question."""
    path = tmp_path / "folder" / "answers.sqlite"
    first, second = Longer(), Longer()
    managed = ManagedJudge(first, cache=path)
    assert managed.judge([*PROMPTS, "p"], [*PAIRS, PAIRS[0]]) == [0, 1, -1, 0]
    assert len(first.asked) == 3  # the repeated pair is sent once
    again = ManagedJudge(second, cache=path)
    assert again.judge(PROMPTS, PAIRS) == [0, 1, -1]
    assert second.asked == [("r", ["aa", "bb"])]
    assert (again.cost["calls"], again.cost["cached"], again.cost["unanswered"]) == (1, 2, 1)
    again.judge(["s", "p"], [["aa", "b"], ["b", "aa"]])
    assert len(second.asked) == 3
    second.cache_key = "another"
    again.judge(PROMPTS[:1], PAIRS[:1])
    assert len(second.asked) == 4


def test_the_key_of_a_chat_judge_is_its_model_and_prompt(tmp_path):
    template = "{prompt}{response0}{response1}"
    made = [
        OpenAIPairwiseJudge(model, system_prompt, client=object(), request_options=options)
        for model, system_prompt, options in (
            ("a", template, None),
            ("b", template, None),
            ("a", template + ".", None),
            ("a", template, {"seed": 1}),
        )
    ]
    assert len({judge.cache_key for judge in made}) == 4
    assert OpenAIPairwiseJudge("a", template, max_requests=3, client=object()).cache_key == made[0].cache_key


def _fill(path, number):
    """Judge 40 pairs, of which half are those of the other process."""
    judge = ManagedJudge(Longer(), cache=path)
    rows = range(20 * number, 20 * number + 40)
    for row in rows:
        judge.judge([f"p{row}"], [["aa", "b"]])


def test_processes_share_a_cache(tmp_path):
    path, context = tmp_path / "answers.sqlite", get_context("fork")
    workers = [context.Process(target=_fill, args=(path, number)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    judge = Longer()
    managed = ManagedJudge(judge, cache=path)
    assert managed.judge([f"p{row}" for row in range(60)], [["aa", "b"]] * 60) == [0] * 60
    assert judge.asked == []


def test_both_orders(tmp_path):
    """A disagreement is a tie: of three pairs, one agrees, one does not, one has no answer."""
    judge = First()
    managed = ManagedJudge(judge, swap_positions=True, cache=tmp_path / "answers")
    prompts, pairs = ["q", "p", "?"], [["a", "bb"], ["a", "b"], ["a", "b"]]
    assert managed.judge(prompts, pairs) == [1, 0.5, -1]
    assert len(judge.asked) == 6 and ("q", ["bb", "a"]) in judge.asked
    assert managed.agreement()["judge/agreement"] == (1, 2)
    assert managed.agreement()["judge/agreement"].count == 0
    assert managed.judge(prompts, pairs, return_scores=True) == [0, 0.5, -1]
    assert len(judge.asked) == 8  # the one without an answer again
    assert managed.agreement()["judge/agreement"].mean == 0.5  # of answers on disk too
    assert shares_of_first(managed, prompts, pairs) == [0, 0.5, None]


class AnyOption(Longer):
    def judge(self, prompts, completions, **options):
        assert options == {"shuffle_order": False}
        return super().judge(prompts, completions)


class NoOption(Longer):
    def judge(self, prompts, completions):
        return super().judge(prompts, completions)


def test_a_judge_does_not_shuffle_both_orders(recwarn):
    assert ManagedJudge(AnyOption(), swap_positions=True).judge(PROMPTS, PAIRS, return_scores=True) == [
        1,
        0,
        -1,
    ]
    assert not [warning for warning in recwarn if warning.category is UserWarning]
    with pytest.warns(UserWarning, match="NoOption has no shuffle_order"):
        managed = ManagedJudge(NoOption(), swap_positions=True)
    assert managed.judge(PROMPTS, PAIRS) == [0, 1, -1]


class Soft(BasePairwiseJudge):
    def judge(self, prompts, completions, shuffle_order=True, return_scores=False):
        assert not shuffle_order
        found = [0.75 if first == "good" else 0.5 for first, _ in completions]
        return found if return_scores else [int(share < 0.5) for share in found]


def test_probabilities_of_both_orders_are_averaged():
    managed = ManagedJudge(Soft(), swap_positions=True)
    given = RewardInputs(prompts=["p"] * 2, completions=["good", "bad"])
    source = JudgeSource(managed, return_scores=True)
    assert RewardSources(source).score(given).scores[:, 0].tolist() == [0.625, 0.375]
    assert source.name == "Soft"


@pytest.fixture
def waits(monkeypatch):
    found = []
    monkeypatch.setattr("trl.rewards.managed_judge.time.sleep", found.append)
    return found


def test_further_attempts(waits):
    """After exceptions with growing waits, and for pairs without an answer at once."""
    judge = First(fails=3)
    managed = ManagedJudge(judge, retries=4)
    assert managed.judge(["p", "?"], [["a", "b"]] * 2) == [0, -1]
    assert waits == [1, 2, 4]
    assert [prompt for prompt, _ in judge.asked] == ["p", "?"] * 4 + ["?"]
    assert (managed.cost["failures"], managed.cost["unanswered"], managed.cost["calls"]) == (3, 1, 9)
    with pytest.raises(ConnectionError, match="gone"):
        ManagedJudge(First(fails=2), retries=1).judge(["p"], [["a", "b"]])


def test_a_late_answer(waits, caplog):
    ever = threading.Event()
    managed = ManagedJudge(First(fails=1, waits=ever), deadline=1.0, retries=1)
    assert managed.judge(["p"], [["a", "b"]]) == [0]
    managed = ManagedJudge(First(fails=9, waits=ever), deadline=0.1, on_failure="skip")
    with caplog.at_level(logging.WARNING):
        assert [managed.judge(["p"], [["a", "b"]]) for _ in range(2)] == [[-1], [-1]]
    ever.set()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "did not answer within 0.1 s" in said[0] and "First" in said[0]


def test_no_attempt_begins_after_the_deadline_of_a_batch(waits):
    gate, ended = threading.Event(), threading.Event()
    judge = First(fails=9, waits=gate)
    managed = ManagedJudge(judge, retries=8)
    managed._fail = lambda error: ended.set()
    sources = RewardSources(JudgeSource(managed), deadline=0.1, on_failure="skip")
    given = RewardInputs(prompts=["p"] * 2, completions=["a", "b"])
    assert sources.score(given).scores.isnan().all()
    gate.set()
    assert ended.wait(20) and len(judge.asked) == 1
    assert (managed.cost["unanswered"], managed.cost["calls"]) == (1, 1)


@pytest.mark.parametrize(
    ("limit", "answers"),
    [({"max_calls": 2}, [0, 1, -1]), ({"max_calls": 0}, [-1] * 3), ({"max_tokens": 0}, [-1] * 3)],
)
def test_a_budget(limit, answers, caplog, tmp_path):
    judge = First()
    managed = ManagedJudge(judge, **limit, on_failure="skip", cache=tmp_path / "answers")
    with caplog.at_level(logging.WARNING):
        assert managed.judge(["p", "q", "r"], [["a", "bb"]] * 3) == answers
    assert len(judge.asked) == 3 - answers.count(-1) and "budget is spent" in caplog.text
    judge.judge = lambda prompts, completions: [2]  # another JudgeError, which is logged too
    managed.max_calls = managed.max_tokens = None
    with caplog.at_level(logging.WARNING):
        assert managed.judge(["s"], [["a", "bb"]]) == [-1]
    assert "gave 2" in caplog.text
    with pytest.raises(ValueError, match=f"First has 3 comparisons left.*{next(iter(limit))}"):
        ManagedJudge(First(), **limit).judge(["p", "q", "r"], [["a", "bb"]] * 3)


def test_answers_on_disk_need_no_budget(tmp_path):
    path = tmp_path / "answers"
    ManagedJudge(Longer(), cache=path).judge(PROMPTS[:2], PAIRS[:2])
    assert ManagedJudge(Longer(), cache=path, max_calls=0).judge(PROMPTS[:2], PAIRS[:2]) == [0, 1]


def test_tokens_are_those_that_the_judge_reports():
    judge = First()
    managed = ManagedJudge(judge, max_tokens=25, on_failure="skip")
    assert [managed.judge(["p"] * 2, [["a", "b"]] * 2) for _ in range(3)] == [[0, 0], [0, 0], [-1, -1]]
    assert managed.cost["tokens"] == judge.num_tokens == 40  # known after a call


@pytest.mark.parametrize(("answer", "error"), [(2, "gave 2"), (float("nan"), "gave nan"), (None, "gave 0 answers")])
def test_invalid_answers_are_not_kept(answer, error, tmp_path):
    judge = Longer()
    judge.judge = lambda prompts, completions: [] if answer is None else [answer] * len(prompts)
    with pytest.raises(ValueError, match=error):
        ManagedJudge(judge, cache=tmp_path / "answers").judge(PROMPTS, PAIRS)
    del judge.judge
    assert ManagedJudge(judge, cache=tmp_path / "answers").judge(PROMPTS, PAIRS) == [0, 1, -1]


def test_bad_input(tmp_path):
    with pytest.raises(TypeError, match="BasePairwiseJudge"):
        ManagedJudge(json)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="retries"):
        ManagedJudge(Longer(), retries=-1)
    with pytest.raises(ValueError, match="max_calls"):
        ManagedJudge(Longer(), max_calls=-1)
    with pytest.raises(ValueError, match="deadline"):
        ManagedJudge(Longer(), deadline=0.0)
    (tmp_path / "text").write_text("This file is not a database, and it is longer than a header. " * 9)
    with pytest.raises(ValueError, match=r"judge cache .*text.* cannot be used"):
        ManagedJudge(Longer(), cache=tmp_path / "text")
