"""Sessions and rollouts with tools for training and export: chains of tokens, and conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from trl.agents.sessions import Turn
from trl.data.rendering import Json
from trl.generation.engine import Generated
from trl.rollouts.experience import SAMPLING_KEPT, SAMPLING_LOGPS, TOOL_OUTPUT, Experience
from trl.tensors.ragged import Ragged


@dataclass(slots=True)
class Chain:
    """Turns one after another: a prompt, and all tokens after it, of which the policy `sampled` some.

    `logps` and `kept` are those of `Generated`, else 0, as numbers of torch's `dtype`. `ended`: by the policy.
    """

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    dtype: str | None = None
    ended: bool = False

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Chain":
        chain = cls(turns[0].context, ended=turns[-1].finish_reason != "length")
        for number, turn in enumerate(turns):
            chain.add(turn.shown if number else [], turn.generated)
        return chain

    def add(self, shown: Sequence[int], new: Generated | None = None) -> None:
        """Append tokens that the policy was shown, and then what it sampled."""
        ids, logps, kept = [] if new is None else new.ids, list[float](), list[float]()
        if new is not None:
            logps, self.dtype = new.logps.tolist(), str(new.logps.dtype).removeprefix("torch.")
            kept = [0.0] * len(ids) if new.kept is None else new.kept.tolist()
        self.ids += [*shown, *ids]
        self.sampled += [False] * len(shown) + [True] * len(ids)
        self.logps += [0.0] * len(shown) + logps
        self.kept += [0.0] * len(shown) + kept


def experience_of(
    rows: Sequence[Sequence[Chain]], columns: Mapping[str, Sequence[float]], *, keeps: bool
) -> Experience:
    """Completions of chains; tokens not sampled are tool output. `keeps`: samples have the mass that was kept."""
    flat = [chain for chains in rows for chain in chains]
    dtype = getattr(torch, next((chain.dtype for chain in flat if chain.dtype is not None), "float32"))
    numbers = {SAMPLING_LOGPS: torch.tensor([logp for chain in flat for logp in chain.logps], dtype=dtype)}
    if keeps:
        numbers[SAMPLING_KEPT] = torch.tensor([mass for chain in flat for mass in chain.kept], dtype=dtype)
    numbers[TOOL_OUTPUT] = torch.tensor([not mark for chain in flat for mark in chain.sampled])
    prompts = Ragged.of([chains[0].prompt for chains in rows])
    completions = Ragged.of([[token for chain in chains for token in chain.ids] for chains in rows])
    return Experience(prompts, completions, numbers, {name: torch.tensor(values) for name, values in columns.items()})


def chains_of(turns: Sequence[Turn]) -> list[Chain]:
    """A session as chains in which each sampled token is once: one for each tree and each further branch.

    A branch's prompt is all before it. Turns after the same one are ordered by tokens.
    """
    children: dict[Turn | None, list[Turn]] = {}
    for turn in sorted(turns, key=_by_tokens):
        children.setdefault(turn.parent, []).append(turn)
    chains, first = list[Chain](), children.get(None, [])
    while first:
        line, first = [first[0]], first[1:]
        while after := children.get(line[-1]):
            line.append(after[0])
            first += after[1:]
        chains.append(Chain.of(line))
    return chains


def _by_tokens(turn: Turn) -> tuple[int, list[int]]:
    return len(turn.context), turn.tokens


def in_order(turns: Sequence[Turn]) -> list[Turn]:
    """Turns by time; those that ran side by side by their tokens, as their order differs from run to run."""
    by_time = sorted(turns, key=lambda turn: turn.started)
    ends = accumulate((turn.ended for turn in by_time), max, initial=0.0)
    groups = accumulate(turn.started >= end for turn, end in zip(by_time, ends, strict=False))
    pairs = zip(groups, by_time, strict=True)
    return [turn for _, turn in sorted(pairs, key=lambda pair: (pair[0], *_by_tokens(pair[1])))]


def conversations_of(turns: Sequence[Turn]) -> list[Json]:
    """The `messages` and `tools` of each conversation of a session that no other one continues."""
    continued = {turn.parent for turn in turns}
    return [
        {"messages": [*turn.messages, turn.message], "tools": list(turn.tools)}
        for turn in turns
        if turn not in continued and turn.messages
    ]
