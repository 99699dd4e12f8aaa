"""Rollouts with tools: the policy writes a turn, its tool calls are answered, and it continues after the answers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl.data.formats import remove_none_values
from trl.data.prompts import PROMPT_IDS
from trl.data.rendering import Message, ProcessingClass
from trl.generation.engine import Generated, Sampling, completion_limits
from trl.rollouts.experience import SAMPLING_KEPT, SAMPLING_LOGPS, STOPPED, TOOL_OUTPUT, Experience
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.rollouts.measures import shared
from trl.rollouts.tool_turns import ReplyWriter, TurnReader, check_tool_template
from trl.rollouts.tools import FAILURES, Reply, Tool, ToolCall, ToolRunner
from trl.tensors.ragged import Ragged
from trl.tensors.reduce import Weighted, weighted

CALLS, LIMITED = "tool_calls", "tool_limited"
FAILED_OF = "tool_failed_"

_TURN = 1 << 56  # between the random streams of a row's turns; other streams are far below


Generate = Callable[..., list[Generated]]
"""`(contexts, *, streams, limits)`: one turn after each context, with its random stream and limit in tokens."""


@dataclass(slots=True)
class Episode:
    """A prompt and its completion so far, of turns and tool answers; `limit` is its maximum length in tokens."""

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
    ended: bool = False  # by the policy
    limited: bool = False  # by the number of turns

    @property
    def context(self) -> list[int]:
        """All tokens so far."""
        return [*self.prompt, *self.ids]

    @property
    def room(self) -> int:
        """Tokens left."""
        return self.limit - len(self.ids)

    def add(self, ids: Sequence[int], logps: Tensor, kept: Tensor | None, *, from_tool: bool) -> None:
        """Append the tokens of a turn, or of answers, with their log-probs."""
        self.ids += ids
        self.from_tool += [from_tool] * len(ids)
        self.logps.append(logps)
        if kept is not None:
            self.kept.append(kept)


class ToolLoop:
    """Completes prompts with the policy and tools: a `Completer`.

    A row ends with a turn without calls, after `iterations` rounds of answers (None: no limit), and at its maximum length or the
    model's `context_length`, which include answers. Other rows are run again from their first token. A tool call takes at most
    `deadline` seconds (None: no limit).

    Raises: ValueError for a chat template without tools.
    """

    exact = True

    def __init__(
        self,
        processing_class: ProcessingClass,
        tools: Mapping[str, Tool],
        *,
        iterations: int | None,
        deadline: float | None,
        context_length: int | None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.schemas = [dict(tool.schema) for tool in tools.values()]
        self.template_kwargs = template_kwargs or {}
        check_tool_template(processing_class, self.schemas, template_kwargs=self.template_kwargs)
        self.reader = TurnReader(processing_class, self.schemas)
        self.writer = ReplyWriter(processing_class, self.schemas)
        self.runner = ToolRunner(tools, deadline=deadline)
        self.iterations, self.context_length = iterations, context_length

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        def generate(contexts: Sequence[Sequence[int]], **each: Sequence[int]) -> list[Generated]:
            with maker.accelerator.autocast():
                return maker.engine.generate(contexts, maker.sampling, **each)

        is_alone = maker.accelerator.num_processes == 1 or not maker.engine.together
        own = rows.get("chat_template_kwargs") or [None] * len(streams)
        episodes = self.play(
            rows[PROMPT_IDS],
            generate,
            maker.sampling,
            streams=streams,
            template_kwargs=[{**self.template_kwargs, **remove_none_values(each or {})} for each in own],
            all_done=bool if is_alone else lambda done: all(gather_object([done])),
        )
        return Completed(experience_of(episodes), messages=[episode.messages for episode in episodes])

    def play(
        self,
        prompts: Sequence[Sequence[int]],
        generate: Generate,
        sampling: Sampling,
        *,
        streams: Sequence[int],
        template_kwargs: Sequence[Mapping[str, Any]],
        all_done: Callable[[bool], bool] = bool,
    ) -> list[Episode]:
        """An episode of each prompt, which depends on its prompt, its stream and its tools' answers only.

        `all_done` tells from whether this process is done whether all are that must generate together.
        """
        limits = completion_limits([len(prompt) for prompt in prompts], sampling, self.context_length)
        episodes = [
            Episode(list(prompt), stream, limit, kwargs)
            for prompt, stream, limit, kwargs in zip(prompts, streams, limits, template_kwargs, strict=True)
        ]
        active, ends = episodes, frozenset(sampling.stop_token_ids or ())
        for round_ in itertools.count():
            if all_done(not active):
                break
            turns = generate(
                [episode.context for episode in active],
                streams=[episode.stream + round_ * _TURN for episode in active],
                limits=[episode.room for episode in active],
            )
            calling = self._take_turns(active, turns, ends)
            if round_ == self.iterations:
                for episode, _ in calling:
                    episode.limited = True
                calling = []
            active = self._answer(calling, ends)
        return episodes

    def _take_turns(
        self, active: Sequence[Episode], turns: Sequence[Generated], ends: frozenset[int]
    ) -> list[tuple[Episode, list[ToolCall]]]:
        """Append the turns, and return the episodes with calls."""
        calling = []
        for episode, generated in zip(active, turns, strict=True):
            turn = self.reader.read(generated.ids, context=episode.context, ends=ends)
            episode.add(generated.ids, generated.logps, generated.kept, from_tool=False)
            episode.messages.append(turn.message)
            if generated.finish_reason != "stop":
                continue
            if turn.calls:
                calling.append((episode, turn.calls))
            else:
                episode.ended = True
        return calling

    def _answer(
        self, calling: Sequence[tuple[Episode, list[ToolCall]]], ends: frozenset[int]
    ) -> list[Episode]:
        """Run all calls at once, and return the episodes that have room to continue after the answers."""
        replies = iter(self.runner.run([call for _, calls in calling for call in calls]))
        continuing = []
        for episode, calls in calling:
            own: list[Reply] = list(itertools.islice(replies, len(calls)))
            episode.calls += len(own)
            episode.failures.update(reply.failure for reply in own if reply.failure is not None)
            messages = [reply.message(call) for call, reply in zip(calls, own, strict=True)]
            ids = self.writer.ids(
                messages, last=episode.ids[-1], ends=ends, template_kwargs=episode.template_kwargs
            )
            if len(ids) < episode.room:
                zeros = torch.zeros(len(ids), dtype=episode.logps[-1].dtype)  # they were not drawn
                episode.add(ids, zeros, zeros if episode.kept else None, from_tool=True)
                episode.messages += messages
                continuing.append(episode)
        return continuing


def experience_of(episodes: Sequence[Episode]) -> Experience:
    """Episodes as an experience.

    Per token: the sampling log-probs (0 for tokens of tools) and `tool_output`. Per row: whether it ended by itself, the numbers
    of its calls and of their failures by kind, and whether the number of turns ended it.
    """
    per_token = {
        SAMPLING_LOGPS: torch.cat([part for episode in episodes for part in episode.logps]),
        TOOL_OUTPUT: torch.tensor([mark for episode in episodes for mark in episode.from_tool]),
    }
    if all(episode.kept for episode in episodes):
        per_token[SAMPLING_KEPT] = torch.cat([part for episode in episodes for part in episode.kept])
    per_row = {
        STOPPED: torch.tensor([episode.ended for episode in episodes]),
        **{name: torch.tensor(counts) for name, counts in tool_counts(episodes).items()},
    }
    prompts, completions = [one.prompt for one in episodes], [one.ids for one in episodes]
    return Experience(Ragged.of(prompts), Ragged.of(completions), per_token, per_row)


def tool_counts(episodes: Sequence[Any]) -> dict[str, list[int]]:
    """The columns per row of tool calls: their number, whether the number of turns ended the row, and failures by kind."""
    failed = {FAILED_OF + kind: [one.failures.get(kind, 0) for one in episodes] for kind in FAILURES}
    return {CALLS: [one.calls for one in episodes], LIMITED: [one.limited for one in episodes], **failed}


def tool_metrics(rows: Mapping[str, Tensor], *, share: float) -> dict[str, Weighted]:
    """Metrics of the calls in rows of all processes, of which this process logs a `share`.

    `tools/call_frequency`: calls per completion; `tools/failure_frequency` and `tools/failures/<kind>`: shares of calls that failed
    (absent without calls); `tools/limit_ratio`: share of completions that the number of turns ended.
    """
    if CALLS not in rows:
        return {}
    calls = rows[CALLS]
    found = {"tools/call_frequency": weighted(calls), "tools/limit_ratio": weighted(rows[LIMITED])}
    if calls.sum():
        failed = {kind: rows[FAILED_OF + kind].sum() for kind in FAILURES}
        found["tools/failure_frequency"] = Weighted(torch.stack(list(failed.values())).sum(), calls.sum())
        found |= {f"tools/failures/{kind}": Weighted(count, calls.sum()) for kind, count in failed.items()}
    return shared(found, share)
