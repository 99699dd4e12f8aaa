"""Sessions of agents as rows for supervised fine-tuning and for preferences."""

import json
from collections.abc import Iterable

from trl.agents.chains import conversations_of
from trl.agents.sessions import Session
from trl.data.formats import common_prefix_length
from trl.data.rendering import Fields, Json

Record = Fields


def session_record(session: Session, reward: float | None) -> Json:
    """The record of an `Endpoint`'s session, as `read_sessions` gives it: `row`, `reward`, `conversations`."""
    return {"row": dict(session.row), "reward": reward, "conversations": conversations_of(session.turns)}


def sft_rows(sessions: Iterable[Record], *, least_reward: float) -> list[Json]:
    """Rows with `messages` (and `tools`) of conversations with at least this reward that end with a message."""
    return [
        {"messages": answered["messages"], **_tools(answered)}
        for session in sessions
        if session["reward"] is not None and session["reward"] >= least_reward
        for answered in _answered(session)
    ]


def preference_rows(sessions: Iterable[Record], *, least_margin: float = 0.0) -> list[Json]:
    """Best and worst session of each row, more than `least_margin` apart: `prompt`, `chosen`, `rejected`.

    The prompt is what both begin with, up to a message of the policy. Of several conversations the longest counts.
    """
    groups, rows = dict[str, list[Record]](), []
    for session in sessions:
        if session["reward"] is not None and _answered(session):
            key = json.dumps(session["row"], sort_keys=True, default=str)
            groups.setdefault(key, []).append(session)
    for group in groups.values():
        best, worst = (choose(group, key=lambda record: record["reward"]) for choose in (max, min))
        if best["reward"] - worst["reward"] <= least_margin:
            continue
        pair = [max(_answered(record), key=lambda chat: len(chat["messages"])) for record in (best, worst)]
        chosen, rejected = (chat["messages"] for chat in pair)
        shared = common_prefix_length(chosen, rejected)
        while shared and not all(part[shared:] and part[shared]["role"] == "assistant" for part in (chosen, rejected)):
            shared -= 1
        if shared:
            parts = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
            rows.append({**parts, **_tools(pair[0])})
    return rows


def _answered(session: Record) -> list[Json]:
    lasts = ((conversation, conversation["messages"][-1]) for conversation in session["conversations"])
    return [conversation for conversation, last in lasts if last.get("content") or last.get("tool_calls")]


def _tools(conversation: Fields) -> Json:
    """As JSON, because schemas of different tools make no column."""
    return {"tools": json.dumps(conversation["tools"])} if conversation["tools"] else {}
