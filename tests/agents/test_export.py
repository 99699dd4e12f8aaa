"""Sessions as rows: good ones to imitate, and pairs of the better and the worse session of a row."""

import math

import pytest
from datasets import Dataset

from tests.agents.test_sessions import client_of, serving, tool_user
from tests.agents.tool_words import call_tokenizer
from tests.trainer.grpo_agent_runs import ROWS, tool_agent, trained
from tests.trainer.grpo_tool_runs import caller
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.agents import preference_rows, read_sessions, session_record, sft_rows

SETTINGS = {
    "max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "save_strategy": "no", "gradient_checkpointing": False, "logging_steps": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trained(
        agent=tool_agent, folder=str(folder), agent_keep_sessions=True, per_device_train_batch_size=len(ROWS) * 4
    )  # fmt: skip
    return list(read_sessions(folder / "sessions"))


def test_all_sessions_of_a_run_are_kept(sessions):
    assert len(sessions) == 2 * 4 * len(ROWS)  # two steps
    assert all(session["row"]["number"] in range(len(ROWS)) for session in sessions)


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_rows_of_sessions_train(kind, sessions, tmp_path):
    if kind == "sft":
        middle = sorted(session["reward"] for session in sessions)[len(sessions) // 2]
        rows = sft_rows(sessions, least_reward=middle)
        good = [session["conversations"] for session in sessions if session["reward"] >= middle]
        assert 0 < len(rows) <= len(good)
        assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
        assert any("tool_calls" in message for row in rows for message in row["messages"])
        config, kind_of = SFTConfig(str(tmp_path), **SETTINGS), SFTTrainer
    else:
        rows = preference_rows(sessions, least_margin=0.5)
        assert 0 < len(rows) <= len(ROWS)
        for row in rows:
            assert row["chosen"] != row["rejected"] and row["prompt"][0]["role"] == "user"
            assert row["chosen"][0]["role"] == row["rejected"][0]["role"] == "assistant"
        config, kind_of = DPOConfig(str(tmp_path), **SETTINGS), DPOTrainer
    data = Dataset.from_list(rows, on_mixed_types="use_json")
    trainer = kind_of(caller(), args=config, train_dataset=data, processing_class=call_tokenizer())
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_records_have_the_rewards_of_reward_functions(tmp_path):
    def place(completions, **_):
        return [None, *map(float, range(1, len(completions)))]

    async def agent(row, base_url, api_key):
        await tool_agent(row, base_url, api_key, rounds=1)

    given = {"reward_funcs": place}
    trained(agent=agent, given=given, folder=str(tmp_path), max_steps=1, agent_keep_sessions=True)
    rewards = [record["reward"] for record in read_sessions(tmp_path / "sessions")]
    assert sorted(rewards, key=lambda each: each or 0) == [None, *map(float, range(1, 8))]


def test_sessions_of_an_endpoint_are_records():
    with serving(caller()) as running:
        session = running.session({"task": 3})
        tool_user(client_of(session))
        record = session_record(session, 1.0)
    (conversation,) = record["conversations"]
    assert record["row"] == {"task": 3} and len(conversation["messages"]) >= 6 and conversation["tools"]
    assert len(sft_rows([record], least_reward=1.0)) == 1
    assert sft_rows([record], least_reward=1.5) == [] == preference_rows([record, record])
    other = {**record, "reward": 0.0, "conversations": [{**conversation, "messages": conversation["messages"][:2]}]}  # fmt: skip
    (pair,) = preference_rows([record, other]) or [None]
    assert pair is None or pair["prompt"] == conversation["messages"][:1]
