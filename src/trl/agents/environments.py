"""Environments as agents of this process: the policy calls an object's methods as tools, or takes steps in it."""

import copy
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from datasets import Dataset, IterableDataset

from trl.agents.chats import TOO_LONG, readable
from trl.agents.journal import Played
from trl.agents.sessions import BUDGET_EXCEEDED, Session, Turn
from trl.agents.tool_turns import check_tool_template
from trl.agents.tools import MOST_LEFT_BEHIND, Reply, Tool, ToolCall, as_text, refusal, reply_of, tools_of
from trl.data.formats import is_list_of_dicts_with, remove_none_values
from trl.data.rendering import Fields, Message, ProcessingClass
from trl.generation.serving.answers import APIError
from trl.reporting.deadlines import DeadlinePassed, ThreadedCalls, bounded
from trl.rewards.functions import accepted

Factory = Callable[[], Any]  # of environments
KIND = "environment"  # the column that chooses among several factories
NO_PROMPT = [{"role": "user", "content": ""}]
NO_TOOLS = ("reset", "get_reward", "close")


@dataclass(frozen=True)
class StepEnvironment:
    """Makes environments in which the policy takes steps: an `environment_factory` for OpenEnv's clients and the like.

    `factory` makes an object with `reset(**row)` and `step(action)`, sync or async; `reset` returns an observation, or
    an object with `observation`, `step` one with `observation`, `reward` (these are summed) and `done`. `action` makes
    an action of what the policy wrote, `show` the text of an observation, which is the user's next message.

    Example:
        >>> environment_factory = StepEnvironment(
        ...     lambda: EchoEnv(base_url="http://localhost:8001"),
        ...     action=lambda text: EchoAction(message=text),
        ...     show=lambda observation: observation.echoed_message,
        ... )  # doctest: +SKIP
    """

    factory: Factory
    action: Callable[[str], Any] = str
    show: Callable[[Any], str] = as_text

    def __call__(self) -> Any:
        return self.factory()


class Kind:
    """The environments of one factory. Raises: TypeError or ValueError for unusable objects and methods."""

    def __init__(self, factory: Factory, tools: Sequence[Callable[..., object]]) -> None:
        if not callable(factory):
            raise TypeError(f"environment_factory must be a class or function, got {factory!r}.")
        self.factory, first = factory, factory()
        self.steps = factory if isinstance(factory, StepEnvironment) else None
        self.free, self.kept, self.name = [first], list[Any](), type(first).__name__
        required = ["reset"] if self.steps is None else ["reset", "step"]
        if missing := [name for name in required if not callable(getattr(first, name, None))]:
            raise ValueError(f"environment_factory made a {self.name} without {missing}. Add the method.")
        if self.steps is not None and tools:
            raise ValueError("tools cannot be combined with a StepEnvironment. Leave them out.")
        self.gives_reward = self.steps is not None or callable(getattr(first, "get_reward", None))
        self.reset = inspect.signature(first.reset)
        functions = (FunctionType, staticmethod, classmethod)
        names = [name for name in dir(type(first)) if not name.startswith("_") and name not in NO_TOOLS]
        names = [name for name in names if isinstance(inspect.getattr_static(type(first), name), functions)]
        methods = [getattr(first, name) for name in names if self.steps is None]
        self.every = tools_of([*methods, *tools])
        self.own_names = list(self.every)[: len(methods)]
        self.schemas = [tool.schema for tool in self.every.values()]

    def tools(self, environment: object) -> dict[str, Tool]:
        methods = {name: Tool(getattr(environment, name), self.every[name].schema) for name in self.own_names}
        return {**self.every, **methods}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError where `reset` needs an argument that no column gives."""
        try:
            self.reset.bind(**accepted(dict.fromkeys(columns), self.reset.parameters))
        except TypeError as error:
            text = f"{self.name}.reset: {error}, the data set has the columns {sorted(columns)}. Add it."
            raise ValueError(text) from None


class EnvironmentAgent:
    """Runs the policy in environments: a session is an episode.

    A `factory`, or several by name, among which a row's column `environment` chooses; `reset` gets the other columns,
    and text that it returns ends the prompt's last message. Public methods are tools, beside the functions `tools`. The
    calls of a turn run one after another, each for at most `deadline` seconds. An episode ends with a turn without
    calls or after `iterations` rounds. With `keeps` reward functions can read environments.
    """

    def __init__(
        self, factory: Factory | Mapping[str, Factory], processing_class: ProcessingClass,
        tools: Sequence[Callable[..., object]], *, iterations: int | None = None, deadline: float | None = None,
        template_kwargs: Fields | None = None, keeps: bool = False,
    ) -> None:  # fmt: skip
        self.chooses = isinstance(factory, Mapping)
        factories = factory if isinstance(factory, Mapping) else {"": factory}
        self.kinds = {name: Kind(factory, tools) for name, factory in factories.items()}
        for kind in self.kinds.values():
            if kind.schemas:
                check_tool_template(processing_class, kind.schemas, template_kwargs=template_kwargs or {})
        self.made = [kind.free[0] for kind in self.kinds.values()]  # those that may be closed
        self.iterations, self.deadline, self.keeps = iterations, deadline, keeps
        self.reward_names = sorted({kind.name for kind in self.kinds.values() if kind.gives_reward})
        self.threads = ThreadedCalls(most_left_behind=MOST_LEFT_BEHIND)

    def released(self, *, ends: bool) -> list[Any]:
        """Make the last rollout batch's environments free; those to close (all if it `ends`) are returned."""
        for kind in self.kinds.values():
            kind.free, kind.kept = [] if ends else kind.free + kind.kept, []
        free = [one for kind in self.kinds.values() for one in kind.free]
        used = {id(one) for one in free}
        unused = [one for one in self.made if id(one) not in used and hasattr(one, "close")]
        self.made = free
        return unused

    async def play(self, session: Session, played: Played) -> float | None:
        """Run an episode; its reward, None for an environment without one."""
        row = {name: remove_none_values(value) for name, value in session.row.items()}
        kind = self.kinds[row.pop(KIND) if self.chooses else ""]
        if not kind.free:
            made = await self.called(kind.factory)
            self.made.append(made)
            kind.free.append(made)
        environment = played.environment = kind.free.pop()
        played.reward_name = kind.name
        observation = await self.called(partial(environment.reset, **accepted(row, kind.reset.parameters)))
        if kind.steps is not None:
            observation = kind.steps.show(getattr(observation, "observation", observation))
        messages = [readable(message) for message in row["prompt"]]
        if observation is not None:  # ends the last message
            shown = readable({"role": "user", "content": observation})["content"]
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + shown}
        await self._turns(session, kind, played, messages)
        if kind.gives_reward and kind.steps is None:
            played.reward = await self.called(environment.get_reward)
        if "deadline" not in played.failures:  # else a cancelled call may have left a thread in it
            (kind.kept if self.keeps else kind.free).append(environment)
        return played.reward

    async def _turns(self, session: Session, kind: Kind, played: Played, messages: list[Message]) -> None:
        """The policy's turns and the environment's answers, until one of them, or the budget, ends the episode."""
        turn, held, begun = None, 0, len(messages)
        for round_ in itertools.count():
            try:
                turn = await session.extend(turn, messages, held, kind.schemas)
            except APIError as error:
                if held == 0 or error.code not in (BUDGET_EXCEEDED, TOO_LONG):
                    raise
                session.cut = session.cut or "length"
                del messages[held:]
                break
            messages.append(turn.message)
            held = len(messages)
            answers = self._replies if kind.steps is None else self._observation
            if not (replies := await answers(kind, played, turn, is_last=round_ == self.iterations)):
                break
            messages += replies
        played.messages = messages[begun:]

    async def _observation(self, kind: Kind, played: Played, turn: Turn, *, is_last: bool) -> list[Message]:
        assert kind.steps is not None
        result = await self.called(partial(played.environment.step, kind.steps.action(turn.text)))
        if result.reward is not None:
            played.reward = (played.reward or 0.0) + float(result.reward)
        played.limited = is_last and not result.done
        if is_last or result.done:
            return []
        return [{"role": "user", "content": kind.steps.show(result.observation)}]

    async def _replies(self, kind: Kind, played: Played, turn: Turn, *, is_last: bool) -> list[Message]:
        if turn.finish_reason == "length" or not turn.calls:
            return []
        played.limited = is_last
        tools, messages = kind.tools(played.environment), list[Message]()
        for call in [] if is_last else turn.calls:
            reply = await self._reply(call, tools)
            played.count(reply)
            messages.append(reply.message(call))
        return messages

    async def _reply(self, call: ToolCall, tools: Mapping[str, Tool]) -> Reply:
        if (refused := refusal(call, tools)) is not None:
            return refused
        function = partial(tools[call.name].function, **copy.deepcopy(call.arguments))
        try:
            return reply_of(await self.called(function, self.deadline))
        except Exception as error:
            if isinstance(error, DeadlinePassed) and not inspect.iscoroutinefunction(function):
                raise  # its thread is still in the environment
            return reply_of(error)

    async def called(self, call: Callable[[], Any], seconds: float | None = None) -> Any:
        """What a call returns or raises, on a thread unless it is async. Raises: DeadlinePassed after `seconds`."""
        is_async = inspect.iscoroutinefunction(call)
        answer = call() if is_async else await self.threads.call(call, "environment", seconds)
        return await bounded(answer, seconds) if inspect.isawaitable(answer) else answer

    def rows(self, dataset: Any) -> Any:
        """Rows, with an empty prompt where there is none. Raises: ValueError if they do not fit the environments."""
        if isinstance(dataset, list):
            dataset = Dataset.from_list(dataset)
        if not isinstance(dataset, (Dataset, IterableDataset)):
            return dataset
        dataset = with_prompts(dataset)
        if isinstance(dataset, IterableDataset):
            return dataset
        if not is_list_of_dicts_with(dataset[0]["prompt"], "role"):
            raise ValueError("environment_factory needs prompts of messages or none, got text. Use messages.")
        columns = set(dataset.column_names)
        if self.chooses:
            names = set(dataset[KIND]) if KIND in columns else {None}
            if unknown := sorted(map(str, names - self.kinds.keys())):
                allowed = f"one of {sorted(self.kinds)}"
                raise ValueError(f"column 'environment' has {unknown}, expected {allowed}. Add or correct it.")
        for kind in self.kinds.values():
            kind.check_columns(columns - {KIND} if self.chooses else columns)
        return dataset


def with_prompts(dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """A data set's rows with an empty prompt where they have none."""
    if "prompt" in (dataset.column_names or ()):
        return dataset
    return dataset.map(lambda row: {"prompt": NO_PROMPT, **row})
