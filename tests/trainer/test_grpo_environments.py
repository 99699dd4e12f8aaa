"""GRPO in environments: methods as tools, rewards of their own, several kinds, data of their own, steps."""

import asyncio
import base64
import json
import pickle
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from tests.agents.tool_words import TOOLS
from tests.generation.stand_in import LocalCopy
from tests.trainer.grpo_agent_runs import agents
from tests.trainer.grpo_runs import logs
from tests.two_processes import ending
from trl.agents import environments as environments_module
from trl.agents.journal import _records
from trl.experimental.openenv import StepEnvironment
from trl.experimental.openenv.utils import generate_rollout_completions
from trl.trainer import group_setup

SETTINGS = {"max_completion_length": 24, "max_tool_calling_iterations": 2, "max_steps": 1}
MADE, RESET, CLOSED = [], [], []


@pytest.fixture(autouse=True)
def nothing_made():
    for each in (MADE, RESET, CLOSED):
        each.clear()


class Sums:
    """Adds numbers; its reward is the number of its calls and of the words that it was given."""

    def __init__(self):
        MADE.append(self)

    def reset(self, word="", **columns):
        RESET.append(word)
        self.word, self.calls, self.columns = word, 0, columns
        return f" {word}"

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The one.
            b: The other.
        """
        self.calls += 1
        return a + b

    async def echo(self, word: str) -> str:
        """Says a word again.

        Args:
            word: What to say.
        """
        await asyncio.sleep(0.001)
        self.calls += 1
        return word

    def fail(self) -> str:
        """Never works."""
        raise OSError("no such luck")

    async def get_reward(self):
        return float(self.calls)

    def _private(self):
        return None


class Quiet(Sums):
    """Has no reward, and one tool less."""

    fail = None
    get_reward = None


def rows(**columns):
    count = len(next(iter(columns.values())))
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": "What is"}]] * count, **columns})


def environments(factory=Sums, *, method="grpo", reward_funcs=None, given=None, data="words", **settings):
    data = rows(word=["one", "two", "three"]) if data == "words" else data
    given = {"agent": None, "environment_factory": factory, "reward_funcs": reward_funcs, **(given or {})}
    if data is None:
        given["train_dataset"] = None
    return agents(method, given=given, data=data, **{**SETTINGS, **settings})


def trained(*factory, **settings):
    trainer, _ = environments(*factory, **settings)
    trainer.train()
    return trainer, trainer._rollout_batch, logs(trainer)[0]


@pytest.mark.parametrize("method", ["grpo", "rloo", "online_dpo"])
def test_methods_are_tools_and_give_the_reward(method):
    trainer, batch, found = trained(method=method)
    assert trainer.rewards.names == ("Sums",)
    counts = batch.per_row
    assert counts["scores"].tolist() == (counts["tool_calls"] - sum(
        counts[f"tool_failed_{kind}"] for kind in ("malformed", "unknown", "arguments", "raised")
    )).tolist()  # fmt: skip
    assert counts["tool_calls"].sum() > 0 and counts["tool_failed_raised"].sum() > 0
    assert found["tools/call_frequency"] == counts["tool_calls"].double().mean()
    assert not any(counts[f"agent_failed_{kind}"].any() for kind in ("raised", "deadline", "silent"))
    assert batch.completions.lengths.max() <= SETTINGS["max_completion_length"]
    first = trainer._tokenizer.decode(batch.prompts.split()[0])
    assert first.startswith("<tools> add echo fail <user> What is") and "_private" not in first
    assert any(first.split()[-2] != word for word in ("one", "two", "three"))  # reset's text, then the assistant


def test_the_answers_are_messages_and_their_tokens_are_not_trained():
    said = []

    def keep(completions, **columns):
        said.extend(completions)
        return [0.0] * len(completions)

    trainer, batch, _ = trained(reward_funcs=keep, per_device_train_batch_size=24)
    from_tool, logps = batch.per_token["tool_output"], batch.per_token["sampling_logps"]
    assert (logps[~from_tool] < 0).all() and (logps[from_tool] == 0).all()
    for messages, ids, marks in zip(said, batch.completions.split(), batch.ragged("tool_output").split(), strict=True):
        assert messages[0]["role"] == messages[-1]["role"] == "assistant"
        shown = trainer._tokenizer.decode(ids[marks]).split()
        assert shown.count("<tool>") == sum(message["role"] == "tool" for message in messages)
        assert all(str(message["content"]) != "3" or "3" in shown for message in messages)
    assert from_tool.any()


def test_environments_are_kept_and_read_by_reward_functions():
    seen = []

    def words(environments, completions, word, **columns):
        seen.append([environment.word for environment in environments])
        assert seen[-1] == word and all(each[-1]["role"] == "assistant" for each in completions)
        return [float(environment.calls) for environment in environments]

    data = rows(word=["one", "two", "three"], hint=[None, None, "yes"])
    trainer, _, found = trained(reward_funcs=words, max_steps=3, data=data)
    assert trainer.rewards.names == ("words", "Sums") and len(seen) == 3
    assert len(MADE) == trainer.sizes.own_rows
    assert found["rewards/words/mean"] == found["rewards/Sums/mean"] == found["reward"] / 2
    assert all(each.columns.keys() == {"prompt", "hint"} for each in MADE)


def test_a_column_chooses_among_several():
    data = rows(word=["one", "two"], environment=["sums", "quiet"])
    trainer, batch, _ = trained(
        {"sums": Sums, "quiet": Quiet},
        data=data,
        shuffle_dataset=False,
    )
    shown = [trainer._tokenizer.decode(row).split()[:4] for row in batch.prompts.split()]
    kinds = [words[3] == "fail" for words in shown]
    assert sorted(set(kinds)) == [False, True]
    scores = batch.per_row["scores"]
    assert [bool(score) for score in scores.isnan()] == [not is_sums for is_sums in kinds]


def test_functions_are_offered_beside_methods():
    def fly() -> str:
        """Flies."""
        return "high"

    trainer, batch, _ = trained(given={"tools": [fly]})
    assert len(trainer.rollouts.completer.environments.kinds[""].schemas) == 4
    assert trainer._tokenizer.decode(batch.prompts.split()[0]).startswith("<tools> add echo fail <unk> <user>")
    assert batch.per_row["tool_failed_unknown"].sum() == 0


class Owner(Sums):
    """Has its own data."""

    def reset(self, seed):
        self.calls, self.seed = 0, seed
        return ["one", "two", "three"][seed % 3]


def test_an_environment_may_own_the_data():
    trainer, batch, _ = trained(Owner, data=None, max_steps=3)
    assert len(trainer.train_dataset) == 3 * trainer.sizes.prompts
    words = [trainer._tokenizer.decode(row).split()[-3] for row in batch.prompts.split()]
    assert len(set(words[:4])) == 1 and set(words) <= {"one", "two", "three"}
    with pytest.raises(ValueError, match="max_steps"):
        environments(Owner, data=None, max_steps=-1)


class Breaks(Sums):
    def reset(self, word):
        super().reset(word)
        if word == "one":
            raise OSError("no display")
        return word

    def get_reward(self):
        if self.word == "two":
            time.sleep(30)
        return 1.0

    async def close(self):
        CLOSED.append(self)
        raise OSError("closed before")


def test_environments_that_fail_are_counted_and_not_used_again(caplog):
    def calls(environments, **_):
        return [float(one.calls) for one in environments]  # those of sessions that failed have none

    settings = {"agent_deadline": 3.0, "per_device_train_batch_size": 12}
    _, batch, found = trained(Breaks, reward_funcs=calls, **settings)
    scores, counts = batch.per_row["scores"], batch.per_row
    assert "no display" in caplog.text
    assert found["agent/failures/raised"] == found["agent/failures/deadline"] == pytest.approx(1 / 3)
    assert scores.isnan().tolist() == (counts["agent_failed_raised"] | counts["agent_failed_deadline"]).bool().tolist()
    assert set(MADE) == set(CLOSED) and len(MADE) == len(CLOSED) == 12 and "closed before" in caplog.text


def test_environments_are_made_side_by_side():
    together = threading.Barrier(7)  # the first is made with the trainer

    class Slow(Sums):
        def __init__(self):
            if len(MADE) > 0:
                together.wait(10)
            super().__init__()

    assert trained(Slow)[2]["agent/failures/raised"] == 0


def test_a_slow_tool_of_one_session_does_not_hold_others_up():
    class Slow(Sums):
        async def echo(self, word: str) -> str:
            """Says a word again.

            Args:
                word: What to say.
            """
            await asyncio.sleep(0.05)
            return await super().echo(word)

    first, second = (trained(kind)[1] for kind in (Sums, Slow))
    assert first.completions.values.tolist() == second.completions.values.tolist()


class Guess:
    """OpenEnv's form: guess a word of the row."""

    def reset(self, word):
        self.word, self.left = word, 3
        return SimpleNamespace(observation={"left": 3}, reward=None, done=False)

    async def step(self, action):
        self.left -= 1
        is_right = self.word in action["said"]
        reward = 1.0 if is_right else -0.25
        return SimpleNamespace(observation={"left": self.left}, reward=reward, done=is_right or self.left == 0)


def test_steps(caplog):
    factory = StepEnvironment(
        Guess, action=lambda text: {"said": text.split()}, show=lambda observation: f" {'hi ' * observation['left']}"
    )  # fmt: skip
    trainer, batch, found = trained(factory, max_completion_length=60, max_tool_calling_iterations=None)
    assert trainer.rewards.names == ("Guess",)
    turns, scores = batch.per_row["agent_turns"], batch.per_row["scores"]
    assert (turns <= 3).all()
    lost = scores == -0.25 * turns
    assert ((scores == 1 - 0.25 * (turns - 1)) | lost).all() and (turns[lost] == 3).any()
    assert "hi hi hi" in trainer._tokenizer.decode(batch.prompts.split()[0])
    assert found["agent/turns"] == turns.double().mean()


def test_they_need_no_server(monkeypatch):
    """Neither to be imported nor to run; agents do."""
    status, written = ending("tests.trainer.without_server")
    assert status == 0, written
    for name in ("generation.serving.app", "generation.serving.openai_api", "agents.openai_app"):
        monkeypatch.setitem(sys.modules, f"trl.{name}", None)
    assert trained()[2]["agent/failures/raised"] == 0
    monkeypatch.setattr(group_setup, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'trl\[serve\]'"):
        agents()


class NoReset:
    def act(self) -> str:
        """Acts."""
        return ""


class Undocumented(Sums):
    def act(self, x):
        return x


@pytest.mark.parametrize(
    ("factory", "given", "error", "named"),
    [
        (NoReset, {}, ValueError, "reset"),
        (Undocumented, {}, ValueError, "Undocumented.act"),
        ("Sums", {}, TypeError, "environment_factory"),
        (Quiet, {}, ValueError, "get_reward"),
        (Owner, {}, ValueError, "seed"),
        ({"sums": Sums}, {}, ValueError, "environment"),
        (Sums, {"agent": lambda: None}, ValueError, "agent"),
        (Sums, {"rollout_func": lambda prompts, trainer: {}}, ValueError, "rollout_func"),
        (Sums, {"tools": TOOLS}, ValueError, "add"),
        (StepEnvironment(Sums), {}, ValueError, "step"),
        (StepEnvironment(Guess), {"tools": TOOLS}, ValueError, "tools"),
    ],
)
def test_what_is_no_environment_is_refused(factory, given, error, named):
    with pytest.raises(error, match=named):
        environments(factory, given=given)


def test_text_prompts_are_refused():
    with pytest.raises(ValueError, match="messages"):
        environments(data=Dataset.from_dict({"prompt": ["What is one ?"]}))


def test_streams_may_have_no_prompts():
    data = Dataset.from_dict({"word": ["one", "two", "three"]}).to_iterable_dataset()
    trainer, batch, _ = trained(data=data)
    assert all("<user>" in trainer._tokenizer.decode(row) for row in batch.prompts.split())


def test_an_opponent_is_not_an_agent():
    with pytest.raises(ValueError, match="opponent"):
        environments(method="nash_md")


def test_resuming_within_a_rollout_batch_is_exact(tmp_path):
    settings = {"steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole, _ = environments(folder=str(tmp_path), **settings)
    whole.train()
    again, _ = environments(folder=str(tmp_path), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for mine, theirs in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("use_vllm", [False, True])
def test_a_rollout_function_may_use_the_engine(use_vllm, monkeypatch):
    monkeypatch.setattr(group_setup, "check_vllm", lambda: None)
    monkeypatch.setattr(group_setup, "VLLMEngine", lambda model, *, accelerator, **_: LocalCopy(model, accelerator))
    calls = []

    def rollout(prompts, trainer):
        found, again = (generate_rollout_completions(trainer, prompts) for _ in range(2))
        short = generate_rollout_completions(trainer, prompts, as_chat=True, generation_overrides={"max_tokens": 1})
        assert all(len(each["completion_ids"]) == 1 for each in short)
        assert [each["completion_ids"] for each in found] != [each["completion_ids"] for each in again]
        assert found[0]["text"] == trainer.processing_class.decode(found[0]["completion_ids"], skip_special_tokens=True)
        with pytest.raises(ValueError, match="as_chat"):
            generate_rollout_completions(trainer, prompts, as_chat=False)
        calls.append(found)
        prompts[0][0]["content"] = "changed"  # in the function's own copy
        return {name: [each[name] for each in found] for name in ("prompt_ids", "completion_ids", "logprobs")}

    def length(prompts, completion_ids, **columns):
        assert all(prompt[0]["content"] == "What is" for prompt in prompts)
        return [float(len(ids)) for ids in completion_ids]

    def run():
        trainer, _ = environments(
            None, reward_funcs=length, given={"rollout_func": rollout}, use_vllm=use_vllm, vllm_mode="colocate",
        )  # fmt: skip
        assert isinstance(trainer.engine, LocalCopy) == use_vllm
        trainer.train()
        return trainer._rollout_batch

    batch = run()
    assert [row.tolist() for row in batch.completions.split()] == [each["completion_ids"] for each in calls[0]]
    assert len({tuple(each["completion_ids"]) for each in calls[0]}) > 2
    assert torch.equal(run().completions.values, batch.completions.values)


class Closes(Sums):
    def close(self):
        CLOSED.append(self)


class Locked(Closes):
    """Has an attribute that is no JSON value."""

    def reset(self, word="", **columns):
        self.lock = threading.Lock()
        return super().reset(word, **columns)


class Restored(Locked):
    """States what restores it."""

    def __getstate__(self):
        return [self.word, self.calls]

    def __setstate__(self, state):
        self.word, self.calls = state


@pytest.mark.parametrize(("factory", "repeated"), [(Closes, 0), (Locked, 8), (Restored, 0)])
def test_environments_of_ended_sessions_are_restored(factory, repeated, tmp_path):
    """Those that are not JSON play their sessions again. Sessions are written once, and all environments closed."""
    seen = []

    def calls(environments, completions, **columns):
        seen.append([(type(one), one.word, one.calls) for one in environments])
        return [float(one.calls) for one in environments]

    settings = {"reward_funcs": calls, "folder": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    for checkpoint in (None, str(tmp_path / "checkpoint-1")):
        RESET.clear()
        CLOSED.clear()
        trainer, _ = environments(factory, **settings, max_steps=2, agent_keep_sessions=True)
        trainer.train(resume_from_checkpoint=checkpoint)
    assert seen[2] == seen[1] and len(seen) == 3 and any(count for *_, count in seen[1])
    assert len(RESET) == repeated
    assert len(CLOSED) == (repeated or 9)  # one is made with the trainer
    keys = [record["key"] for record in _records(tmp_path / "sessions", "*.jsonl") if "row" in record]
    assert len(keys) == len(set(keys)) == 16


def test_no_code_of_a_journal_runs(tmp_path):
    """A pickle in a record, as older versions wrote it, is not read: the session is played again."""

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    settings = {
        "reward_funcs": lambda environments, **columns: [0.0] * len(environments), "folder": str(tmp_path),
        "save_strategy": "steps", "save_steps": 1, "agent_keep_sessions": True,
    }  # fmt: skip
    environments(Closes, **settings, max_steps=2)[0].train()
    for file in (tmp_path / "sessions").glob("*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines() if line]
        assert all(record["environment"][0].endswith(".Closes") for record in records if "row" in record)
        pickled = base64.b64encode(pickle.dumps(Evil())).decode()
        lines = [json.dumps({**record, "environment": pickled}) for record in records]
        file.write_text("\n".join(lines))
    RESET.clear()
    environments(Closes, **settings, max_steps=2)[0].train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(RESET) == 8
    assert not (tmp_path / "ran").exists()


def test_threads_that_miss_their_deadline_are_bounded(monkeypatch):
    hung, released = [], threading.Event()

    class Hangs(Sums):
        def echo(self, word: str) -> str:
            """Says a word again.

            Args:
                word: What to say.
            """
            hung.append(word)
            released.wait(60)
            return word

    monkeypatch.setattr(environments_module, "MOST_LEFT_BEHIND", 2)
    trainer, _ = environments(Hangs, tool_deadline=0.5, max_steps=2, agent_concurrency=1)
    try:
        with pytest.raises(RuntimeError, match="earlier calls"):
            trainer.train()
        failed = trainer._rollout_batch.per_row
        assert failed["agent_failed_deadline"].sum() == 2 <= failed["agent_failed_raised"].sum()
        assert len(hung) == 2
    finally:
        released.set()


def test_an_evaluation_set_may_have_no_prompts():
    """Outside of training its environments are closed."""
    data = Dataset.from_dict({"word": ["one", "two", "three"]})
    trainer, _ = environments(Closes, data=data)
    for _ in range(2):
        metrics = trainer.evaluate(data.select(range(2)))
        assert metrics["eval_rewards/Closes/mean"] == metrics["eval_reward"] > 0
        assert set(CLOSED) == set(MADE) and len(CLOSED) == len(MADE)
    with pytest.raises(ValueError, match="environment"):
        environments({"sums": Sums}, data=rows(word=["one"], environment=["sums"]))[0].evaluate(data)
