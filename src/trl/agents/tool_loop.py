"""Rollouts with tools: the policy writes a turn, its tool calls are answered, and it continues after the answers."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from accelerate.utils import gather_object

from trl.agents.chains import Chain, experience_of
from trl.agents.journal import Played
from trl.agents.tool_turns import ReplyWriter, TurnReader, check_tool_template
from trl.agents.tools import FAILURES, Tool, ToolCall, ToolRunner
from trl.data.formats import remove_none_values
from trl.data.prompts import PROMPT_IDS
from trl.data.rendering import Fields, ProcessingClass
from trl.generation.engine import Generated, Sampling, completion_limits
from trl.rollouts.experience import STOPPED
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.rollouts.measures import CALLS, FAILED_OF, LIMITED

_TURN = 1 << 56  # between the random streams of a row's turns; other streams are far below

Generate = Callable[..., list[Generated]]
"""`(contexts, *, streams, limits)`: one turn after each context, with its random stream and limit in tokens."""


class Episode(NamedTuple):
    """A row in progress: its `chain` is that of `played`, `limit` its maximum length in tokens."""

    played: Played
    chain: Chain
    stream: int
    limit: int
    template_kwargs: Fields

    @property
    def context(self) -> list[int]:
        return [*self.chain.prompt, *self.chain.ids]

    @property
    def room(self) -> int:
        return self.limit - len(self.chain.ids)


class ToolLoop:
    """Completes prompts with the policy and tools: a `Completer`. Raises: ValueError for a template without tools.

    A row ends with a turn without calls, after `iterations` rounds of answers, and at its maximum length or the model's
    `context_length`, which include answers. A call takes at most `deadline` seconds. None: no limit.
    """

    exact = True

    def __init__(
        self, processing_class: ProcessingClass, tools: Mapping[str, Tool], *, iterations: int | None,
        deadline: float | None, context_length: int | None, template_kwargs: Fields | None = None,
    ) -> None:  # fmt: skip
        self.schemas = [dict(tool.schema) for tool in tools.values()]
        self.template_kwargs = template_kwargs or {}
        check_tool_template(processing_class, self.schemas, template_kwargs=self.template_kwargs)
        self.reader = TurnReader(processing_class, self.schemas)
        self.writer = ReplyWriter(processing_class, self.schemas)
        self.runner = ToolRunner(tools, deadline=deadline)
        self.iterations, self.context_length = iterations, context_length

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        keeps = True

        def generate(contexts: Sequence[Sequence[int]], **options: Sequence[int]) -> list[Generated]:
            nonlocal keeps
            with maker.accelerator.autocast():
                turns = maker.engine.generate(contexts, maker.sampling, **options)
            keeps = keeps and all(turn.kept is not None for turn in turns)
            return turns

        is_alone = maker.accelerator.num_processes == 1 or not maker.engine.together
        kwargs = rows.get("chat_template_kwargs") or [None] * len(streams)
        played = self.play(
            rows[PROMPT_IDS], generate, maker.sampling, streams=streams,
            template_kwargs=[{**self.template_kwargs, **remove_none_values(more or {})} for more in kwargs],
            all_done=bool if is_alone else lambda done: all(gather_object([done])),
        )  # fmt: skip
        columns = {STOPPED: [one.chains[0].ended for one in played], **tool_counts(played)}
        experience = experience_of([one.chains for one in played], columns, keeps=keeps)
        return Completed(experience, messages=[one.messages for one in played])

    def play(
        self, prompts: Sequence[Sequence[int]], generate: Generate, sampling: Sampling, *, streams: Sequence[int],
        template_kwargs: Sequence[Fields], all_done: Callable[[bool], bool] = bool,
    ) -> list[Played]:  # fmt: skip
        """An episode of each prompt; `all_done` tells whether all processes that generate together are done."""
        limits = completion_limits([len(prompt) for prompt in prompts], sampling, self.context_length)
        chains = [Chain(list(prompt)) for prompt in prompts]
        played = [Played([chain]) for chain in chains]
        columns = played, chains, streams, limits, template_kwargs
        active = [Episode(*row) for row in zip(*columns, strict=True)]
        ends = frozenset(sampling.stop_token_ids or ())
        for round_ in itertools.count():
            if all_done(not active):
                break
            turns = generate(
                [episode.context for episode in active],
                streams=[episode.stream + round_ * _TURN for episode in active],
                limits=[episode.room for episode in active],
            )
            calling: list[tuple[Episode, list[ToolCall]]] = []
            for episode, generated in zip(active, turns, strict=True):
                turn = self.reader.read(generated.ids, context=episode.context, ends=ends)
                episode.chain.add([], generated)
                episode.played.messages.append(turn.message)
                if generated.finish_reason == "stop" and turn.calls:
                    calling.append((episode, turn.calls))
                    episode.played.limited = round_ == self.iterations
                else:
                    episode.chain.ended = generated.finish_reason == "stop"
            active = self._answer([] if round_ == self.iterations else calling, ends)
        return played

    def _answer(self, calling: Sequence[tuple[Episode, list[ToolCall]]], ends: frozenset[int]) -> list[Episode]:
        """Run all calls at once, and return the episodes that have room to continue after the answers."""
        replies = iter(self.runner.run([call for _, calls in calling for call in calls]))
        continuing = []
        for episode, calls in calling:
            played, messages = episode.played, []
            for call, reply in zip(calls, replies, strict=False):
                played.count(reply)
                messages.append(reply.message(call))
            last, kwargs = episode.chain.ids[-1], episode.template_kwargs
            ids = self.writer.ids(messages, last=last, ends=ends, template_kwargs=kwargs)
            if len(ids) < episode.room:
                episode.chain.add(ids)
                played.messages += messages
                continuing.append(episode)
        return continuing


def tool_counts(played: Sequence[Played]) -> dict[str, list[int]]:
    """The columns per row of tool calls: their number, whether the limit of turns ended it, failures by kind."""
    failed = {FAILED_OF + kind: [one.failures.get(kind, 0) for one in played] for kind in FAILURES}
    return {CALLS: [one.calls for one in played], LIMITED: [one.limited for one in played], **failed}
