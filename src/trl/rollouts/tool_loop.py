"""Rollouts with tools: the policy speaks, the calls in what it said are answered, and it goes on behind the answers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trl.data.rendering import Message, ProcessingClass
from trl.generation.engine import Generated, Sampling, completion_limits
from trl.rollouts.columns import SAMPLING_KEPT, SAMPLING_LOGPS, STOPPED, TOOL_OUTPUT
from trl.rollouts.experience import Experience
from trl.rollouts.tool_runs import FAILURES, Reply, ToolCall, ToolRunner
from trl.rollouts.tool_schemas import Tool
from trl.rollouts.tool_turns import ReplyWriter, Turn, TurnReader
from trl.tensors.ragged import Ragged

CALLS, LIMITED = "tool_calls", "tool_limited"
FAILED_OF = "tool_failed_"

_TURN = (
    1 << 56
)  # between the random streams of one row's turns: those of rows, refills and evaluations are far below it


class Speak(Protocol):
    """One turn of the policy behind each of some contexts, each with a random stream and a limit in tokens."""

    def __call__(
        self, contexts: Sequence[Sequence[int]], *, streams: Sequence[int], limits: Sequence[int]
    ) -> list[Generated]: ...


@dataclass(slots=True)
class Episode:
    """A row: a prompt and what was said behind it so far. `limit` counts the tokens of all turns and answers."""

    prompt: list[int]
    stream: int
    limit: int
    template_kwargs: Mapping[str, Any]
    ids: list[int] = field(default_factory=list)
    from_tool: list[bool] = field(default_factory=list)
    logps: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    ended: bool = False  # by the policy itself
    limited: bool = False  # by the number of turns

    @property
    def context(self) -> list[int]:
        """All tokens so far."""
        return [*self.prompt, *self.ids]

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.limit - len(self.ids)

    def say(self, turn: Generated) -> None:
        """Go on by what the policy said."""
        self.ids += turn.ids
        self.from_tool += [False] * len(turn.ids)
        self.logps.append(turn.logps)
        if turn.kept is not None:
            self.kept.append(turn.kept)

    def hear(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Go on by what tools answered, which has no probability."""
        self.ids += ids
        self.from_tool += [True] * len(ids)
        nothing = torch.zeros(len(ids), dtype=self.logps[-1].dtype)
        self.logps.append(nothing)
        if self.kept:
            self.kept.append(nothing)
        self.messages += messages

    def count(self, replies: Sequence[Reply]) -> None:
        """Note calls, and what went wrong in them."""
        self.calls += len(replies)
        self.failures.update(reply.failure for reply in replies if reply.failure is not None)


class ToolLoop:
    """Plays rows of prompts to their end.

    A row ends where a turn has no calls, after `iterations` rounds of answers (None: no limit), and where its greatest length
    or the model's `context_length` is reached; answers count toward both. Rows that have ended leave; those that go on are read anew
    from their first token. `agree` says, of whether this process is done, whether all are (where they must generate together).
    """

    def __init__(
        self,
        processing_class: ProcessingClass,
        tools: Mapping[str, Tool],
        *,
        iterations: int | None,
        deadline: float | None,
        context_length: int | None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        schemas = [tool.schema for tool in tools.values()]
        self.reader, self.writer = (
            TurnReader(processing_class, schemas),
            ReplyWriter(processing_class, schemas),
        )
        self.runner = ToolRunner(tools, deadline=deadline)
        self.iterations, self.context_length, self.agree = iterations, context_length, agree

    def play(
        self,
        prompts: Sequence[Sequence[int]],
        speak: Speak,
        sampling: Sampling,
        *,
        streams: Sequence[int],
        template_kwargs: Sequence[Mapping[str, Any]],
    ) -> list[Episode]:
        """An episode of each prompt. What one becomes depends on its prompt, its stream and its tools' answers alone."""
        limits = completion_limits([len(prompt) for prompt in prompts], sampling, self.context_length)
        episodes = [
            Episode(list(prompt), stream, limit, kwargs)
            for prompt, stream, limit, kwargs in zip(prompts, streams, limits, template_kwargs, strict=True)
        ]
        active, ends = episodes, frozenset(sampling.stop_token_ids or ())
        for round_ in itertools.count():
            if self.agree(not active):
                return episodes
            said = speak(
                [episode.context for episode in active],
                streams=[episode.stream + round_ * _TURN for episode in active],
                limits=[episode.room for episode in active],
            )
            asking = self._take_turns(active, said, ends)
            if round_ == self.iterations:
                for episode, _ in asking:
                    episode.limited = True
                asking = []
            active = self._answered(asking, ends)
        raise AssertionError("a count has no end")

    def _take_turns(
        self, active: Sequence[Episode], said: Sequence[Generated], ends: frozenset[int]
    ) -> list[tuple[Episode, list[ToolCall]]]:
        """Add what was said, and give the episodes that wait for answers, with their calls."""
        asking = []
        for episode, generated in zip(active, said, strict=True):
            turn: Turn = self.reader.read(generated.ids, context=episode.context, ends=ends)
            episode.say(generated)
            episode.messages.append(turn.message)
            if generated.finish_reason != "stop":
                continue
            if turn.calls:
                asking.append((episode, turn.calls))
            else:
                episode.ended = True
        return asking

    def _answered(
        self, asking: Sequence[tuple[Episode, list[ToolCall]]], ends: frozenset[int]
    ) -> list[Episode]:
        """Answer all calls at once, and give the episodes that have room to go on behind the answers."""
        replies = iter(self.runner.run([call for _, calls in asking for call in calls]))
        going_on = []
        for episode, calls in asking:
            own = list(itertools.islice(replies, len(calls)))
            episode.count(own)
            messages: list[Message] = [
                {"role": "tool", **({"name": call.name} if call.name else {}), "content": reply.text}
                for call, reply in zip(calls, own, strict=True)
            ]
            ids = self.writer.ids(
                messages, last=episode.ids[-1], ends=ends, template_kwargs=episode.template_kwargs
            )
            if len(ids) < episode.room:
                episode.hear(ids, messages)
                going_on.append(episode)
        return going_on


def experience_of(episodes: Sequence[Episode]) -> Experience:
    """Episodes as an experience.

    Per token `tool_output` (bool: written by tools), and the sampling log-probs, 0 there; per row whether it ended by itself,
    how many calls it made, how many of them failed in which way, and whether the number of turns cut it off.
    """
    per_token = {
        SAMPLING_LOGPS: torch.cat([part for episode in episodes for part in episode.logps]),
        TOOL_OUTPUT: torch.tensor([mark for episode in episodes for mark in episode.from_tool]),
    }
    if all(episode.kept for episode in episodes):
        per_token[SAMPLING_KEPT] = torch.cat([part for episode in episodes for part in episode.kept])
    per_row = {
        STOPPED: torch.tensor([episode.ended for episode in episodes]),
        CALLS: torch.tensor([episode.calls for episode in episodes]),
        LIMITED: torch.tensor([episode.limited for episode in episodes]),
        **{FAILED_OF + kind: torch.tensor([one.failures[kind] for one in episodes]) for kind in FAILURES},
    }
    prompts, completions = [one.prompt for one in episodes], [one.ids for one in episodes]
    return Experience(Ragged.of(prompts), Ragged.of(completions), per_token, per_row)
