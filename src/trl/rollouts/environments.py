"""Environments as agents of this process: the policy calls an object's methods as tools, or takes steps in it."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

from datasets import Dataset

from trl.data.formats import is_list_of_dicts_with, remove_none_values
from trl.data.rendering import Message, ProcessingClass
from trl.generation.serving.openai_api import APIError
from trl.reporting.deadlines import bounded, start
from trl.rewards.functions import accepted
from trl.rollouts.endpoint import OpenSession
from trl.rollouts.sessions import BUDGET_EXCEEDED, TOO_LONG, Turn, readable
from trl.rollouts.tool_turns import TurnReader, check_tool_template
from trl.rollouts.tools import Reply, Tool, ToolCall, as_text, refusal, reply_of, tools_of

KIND = "environment"  # the column that chooses among several factories
SEED = "seed"  # the column of rows that were made for environments with data of their own
_NO_TOOLS = ("reset", "get_reward")


@dataclass(frozen=True)
class StepEnvironment:
    """Makes environments in which the policy takes steps: an `environment_factory` for OpenEnv's clients and the like.

    `factory` makes an object with `reset(**row)` and `step(action)`, sync or async; `reset` returns an observation, or an object
    with `observation`, `step` one with `observation`, `reward` and `done`. `action` makes an action of what the policy wrote,
    `show` makes the text of an observation, which is the user's next message. The reward is the sum of the steps' rewards.

    Example:
        >>> environment_factory = StepEnvironment(
        ...     lambda: EchoEnv(base_url="http://localhost:8001"),
        ...     action=lambda text: EchoAction(message=text),
        ...     show=lambda observation: observation.echoed_message,
        ... )  # doctest: +SKIP
    """

    factory: Callable[[], Any]
    action: Callable[[str], Any] = str
    show: Callable[[Any], str] = as_text

    def __call__(self) -> Any:
        return self.factory()


@dataclass(slots=True)
class Episode:
    """A rollout in an environment: the messages after the prompt, the calls of tools, and the rewards of steps."""

    kind: Kind
    environment: Any
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    calls: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    limited: bool = False  # by the number of turns

    @property
    def is_usable(self) -> bool:
        """Whether the environment may be reset and used again: no thread is left in it."""
        return not self.failures["deadline"]


class Kind:
    """The environments of one factory: their tools, and those of them that are free.

    Raises: TypeError or ValueError for an object that is no environment, and for methods that cannot be tools.
    """

    def __init__(self, factory: Callable[[], Any], tools: Sequence[Callable[..., Any]]) -> None:
        if not callable(factory):
            raise TypeError(
                f"environment_factory must be a function or class without arguments, got {factory!r}."
            )
        self.factory, self.plain = factory, tools_of(list(tools))
        self.steps = factory if isinstance(factory, StepEnvironment) else None
        first = factory()
        self.free, self.name = [first], type(first).__name__
        required = ["reset"] if self.steps is None else ["reset", "step"]
        if missing := [name for name in required if not callable(getattr(first, name, None))]:
            raise ValueError(
                f"environment_factory made a {self.name} without {' and '.join(missing)}. Add the method."
            )
        if self.steps is not None and tools:
            raise ValueError(
                "tools cannot be combined with a StepEnvironment, which has none. Leave them out."
            )
        self.gives_reward = self.steps is not None or callable(getattr(first, "get_reward", None))
        self.parameters = inspect.signature(first.reset).parameters
        methods = [] if self.steps is not None else _public_methods(first)
        own = tools_of([getattr(first, name) for name in methods])
        if both := sorted(own.keys() & self.plain.keys()):
            raise ValueError(f"tools {both} have the names of methods of {self.name}. Rename them.")
        self.own = {name: tool.schema for name, tool in own.items()}
        self.schemas = [*self.own.values(), *(tool.schema for tool in self.plain.values())]

    def tools(self, environment: Any) -> dict[str, Tool]:
        """The tools of one environment."""
        own = {name: Tool(getattr(environment, name), schema) for name, schema in self.own.items()}
        return {**own, **self.plain}

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise ValueError where `reset` needs an argument that no column gives."""
        kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        needed = [p.name for p in self.parameters.values() if p.default is p.empty and p.kind in kinds]
        if missing := sorted(set(needed) - set(columns)):
            raise ValueError(
                f"{self.name}.reset needs {missing}, the data set has the columns {sorted(columns)}. Add them."
            )


class EnvironmentAgent:
    """Runs the policy in environments: a session is an episode.

    A `factory`, or several by name, among which a row's column `environment` chooses. The row's other columns are given to
    `reset`; text that it returns ends the prompt's last message. Public methods are tools, beside the functions `tools`.
    The calls of a turn run one after another, each for at most `deadline` seconds, and an episode ends with a turn without calls or
    after `iterations` rounds of them. Environments are kept, and reset for each episode.
    """

    def __init__(
        self,
        factory: Callable[[], Any] | Mapping[str, Callable[[], Any]],
        processing_class: ProcessingClass,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        iterations: int | None = None,
        deadline: float | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.chooses = isinstance(factory, Mapping)
        factories: Any = factory if self.chooses else {"": factory}
        self.kinds = {name: Kind(each, tools) for name, each in factories.items()}
        for kind in self.kinds.values():
            if kind.schemas:
                check_tool_template(processing_class, kind.schemas, template_kwargs=template_kwargs or {})
        self.processing_class, self.iterations, self.deadline = processing_class, iterations, deadline
        self.reward_names = sorted({kind.name for kind in self.kinds.values() if kind.gives_reward})
        self.keeps = False  # environments until the next rollout batch, because reward functions read them
        self.episodes: dict[str, Episode] = {}
        self._kept: list[Episode] = []

    def begin(self) -> None:
        """Forget the episodes of the last rollout batch."""
        for episode in self._kept:
            episode.kind.free.append(episode.environment)
        self._kept, self.episodes = [], {}

    async def play(self, session: OpenSession) -> float | None:
        """Run an episode; its reward, None for an environment without one."""
        row = {name: remove_none_values(value) for name, value in session.row.items()}
        kind = self.kinds[row.pop(KIND) if self.chooses else ""]
        environment = kind.free.pop() if kind.free else kind.factory()
        episode = self.episodes[session.api_key] = Episode(kind, environment)
        found = await called(partial(environment.reset, **accepted(row, kind.parameters)))
        await self._turns(session, episode, _opening(row["prompt"], self._text(kind, found)))
        if kind.steps is not None:
            reward = sum(episode.rewards) if episode.rewards else None
        else:
            reward = await called(environment.get_reward) if kind.gives_reward else None
        if episode.is_usable:
            (self._kept.append(episode) if self.keeps else kind.free.append(environment))
        return reward

    async def _turns(self, session: OpenSession, episode: Episode, messages: list[Message]) -> None:
        """The policy's turns and the environment's answers, until one of them, or the budget, ends the episode."""
        kind, turn, held = episode.kind, None, 0
        begun = len(messages)
        for round_ in itertools.count():
            try:
                turn = session.session.extend(turn, messages, held, kind.schemas)
                await turn.result()
            except APIError as error:
                if held == 0 or error.code not in (BUDGET_EXCEEDED, TOO_LONG):
                    raise
                session.session.cut = session.session.cut or "length"
                del messages[held:]
                break
            messages.append(turn.message)
            held = len(messages)
            replies = await self._replies(episode, turn, is_last=round_ == self.iterations)
            if not replies:
                break
            messages += replies
        episode.messages = messages[begun:]

    async def _replies(self, episode: Episode, turn: Turn, *, is_last: bool) -> list[Message]:
        """The answers to a turn; none if it ends the episode."""
        kind, generated = episode.kind, turn.generated
        assert generated is not None and turn.written is not None
        if kind.steps is not None:
            found = await called(partial(episode.environment.step, kind.steps.action(turn.written.text)))
            if found.reward is not None:
                episode.rewards.append(float(found.reward))
            if found.done:
                return []
            episode.limited = is_last
            return [] if is_last else [{"role": "user", "content": kind.steps.show(found.observation)}]
        reader = TurnReader(self.processing_class, kind.schemas)
        ends = turn.session.chats.ends
        calls = reader.read(generated.ids, context=turn.context, ends=ends).calls if kind.schemas else []
        if generated.finish_reason != "stop" or not calls:
            return []
        if is_last:
            episode.limited = True
            return []
        tools, messages = kind.tools(episode.environment), list[Message]()
        for call in calls:
            reply = await self._reply(call, tools)
            episode.calls += 1
            episode.failures.update([reply.failure] if reply.failure else [])
            name = {"name": call.name} if call.name else {}
            messages.append({"role": "tool", **name, "content": reply.text})
        return messages

    async def _reply(self, call: ToolCall, tools: Mapping[str, Tool]) -> Reply:
        if (refused := refusal(call, tools)) is not None:
            return refused
        try:
            function = partial(tools[call.name].function, **copy.deepcopy(call.arguments))
            return reply_of(await called(function, self.deadline))
        except Exception as error:
            return reply_of(error)

    @staticmethod
    def _text(kind: Kind, found: Any) -> Any:
        """What `reset` returned as text."""
        if kind.steps is None:
            return found
        return kind.steps.show(getattr(found, "observation", found))


async def called(call: Callable[[], Any], seconds: float | None = None) -> Any:
    """What a function returns, a coroutine function on this event loop and another on a thread.

    Raises: DeadlinePassed after `seconds`, and what the function raises.
    """
    if inspect.iscoroutinefunction(call):
        return await bounded(call(), seconds)
    found = await bounded(asyncio.wrap_future(start(call, "environment").future), seconds)
    return await bounded(found, seconds) if inspect.isawaitable(found) else found


def _opening(prompt: Sequence[Message], observation: Any) -> list[Message]:
    """A prompt with an observation at the end of its last message."""
    messages = [readable(message) for message in prompt]
    if observation is not None:
        shown = readable({"role": "user", "content": observation})["content"]
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + shown}
    return messages


def _public_methods(environment: Any) -> list[str]:
    kind = type(environment)
    return [
        name
        for name in dir(kind)
        if not name.startswith("_")
        and name not in _NO_TOOLS
        and isinstance(inspect.getattr_static(kind, name), (FunctionType, staticmethod, classmethod))
    ]


def environment_rows(agent: EnvironmentAgent, dataset: Any, *, count: int | None = None) -> Any:
    """Rows for environments: without a `prompt` they have an empty one, and without a data set `count` rows have a `seed` each.

    Raises: ValueError for rows that do not fit the environments.
    """
    empty = [{"role": "user", "content": ""}]
    if dataset is None and count is not None:
        dataset = Dataset.from_dict({SEED: list(range(count))})
    elif isinstance(dataset, list):
        dataset = Dataset.from_list(dataset)
    if not isinstance(dataset, Dataset):
        return dataset
    if "prompt" not in dataset.column_names:
        dataset = dataset.add_column("prompt", [empty] * len(dataset))  # type: ignore[call-arg]
    elif not is_list_of_dicts_with(dataset[0]["prompt"], "role"):
        raise ValueError("environment_factory needs prompts of messages, or none, got text. Write messages.")
    if agent.chooses:
        given = set(dataset[KIND]) if KIND in dataset.column_names else {None}
        if unknown := given - agent.kinds.keys():
            raise ValueError(
                f"column 'environment' has {sorted(map(str, unknown))}, expected one of {sorted(agent.kinds)}. Add or correct it."
            )
    for kind in agent.kinds.values():
        kind.check_columns([name for name in dataset.column_names if not (agent.chooses and name == KIND)])
    return dataset
