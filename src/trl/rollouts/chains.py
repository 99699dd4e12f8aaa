"""What a session is to training and to export: chains of tokens, and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from trl.rollouts.sessions import Turn


@dataclass(slots=True)
class Chain:
    """Turns one after another: a prompt, and all tokens after it, of which the policy `sampled` some.

    `logps` and `kept` are those of `Generated`, 0 for the other tokens, as numbers of torch's `dtype`. `ended`: by the policy.
    """

    prompt: list[int]
    ids: list[int]
    sampled: list[bool]
    logps: list[float]
    kept: list[float]
    dtype: str
    ended: bool

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Chain:
        """Of turns that follow each other."""
        chain = cls(turns[0].context, [], [], [], [], "", turns[-1].finish_reason != "length")
        for number, turn in enumerate(turns):
            shown, new = turn.shown if number else [], turn.generated
            assert new is not None
            chain.ids += [*shown, *new.ids]
            chain.sampled += [False] * len(shown) + [True] * len(new.ids)
            chain.logps += [0.0] * len(shown) + new.logps.tolist()
            kept = torch.zeros_like(new.logps) if new.kept is None else new.kept
            chain.kept += [0.0] * len(shown) + kept.tolist()
            chain.dtype = str(new.logps.dtype).removeprefix("torch.")
        return chain


def chains_of(turns: Sequence[Turn]) -> list[Chain]:
    """A session as chains in which each sampled token is once: one for each tree, and one more for each further branch.

    A branch's prompt is all that came before it. Turns after the same one are ordered by their tokens, short prompts first, and
    not by time, which differs from run to run for requests side by side.
    """
    children: dict[Turn | None, list[Turn]] = {}
    for turn in sorted(turns, key=_by_tokens):
        children.setdefault(turn.parent, []).append(turn)
    found, first = list[Chain](), children.get(None, [])
    while first:
        line, first = [first[0]], first[1:]
        while after := children.get(line[-1]):
            line.append(after[0])
            first += after[1:]
        found.append(Chain.of(line))
    return found


def _by_tokens(turn: Turn) -> Any:
    return len(turn.context), turn.tokens


def in_order(turns: Sequence[Turn]) -> list[Turn]:
    """Turns by time; those that ran side by side by their tokens, because their order in time differs from run to run."""
    by_time = sorted(turns, key=lambda turn: turn.started)
    ends = accumulate((turn.ended for turn in by_time), max, initial=0.0)
    groups = accumulate(turn.started >= end for turn, end in zip(by_time, ends, strict=False))
    pairs = zip(groups, by_time, strict=True)
    return [turn for _, turn in sorted(pairs, key=lambda pair: (pair[0], *_by_tokens(pair[1])))]


def conversations_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The `messages` and `tools` of each conversation of a session that no other one continues."""
    continued = {turn.parent for turn in turns}
    return [
        {"messages": [*turn.messages, turn.message], "tools": list(turn.tools)}
        for turn in turns
        if turn not in continued and turn.messages
    ]
