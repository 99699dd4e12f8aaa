"""Rollouts by agents: each row is a session of an agent with the policy, over an OpenAI-style endpoint."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import shlex
import signal
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from accelerate.utils import gather_object

from trl.data.prompts import PROMPT_IDS
from trl.data.rendering import ProcessingClass, text_tokenizer
from trl.generation.engine import Generated
from trl.reporting.deadlines import AsyncCalls, DeadlinePassed, Pending
from trl.rollouts.endpoint import Endpoint, OpenSession
from trl.rollouts.environments import EnvironmentAgent, Episode
from trl.rollouts.experience import BRANCHES, SAMPLING_KEPT, SAMPLING_LOGPS, STOPPED, TOOL_OUTPUT, Experience
from trl.rollouts.journal import Journal
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.rollouts.measures import CHAINS, CUT, OUTCOME_OF, OUTCOMES, TURNS, Outcome
from trl.rollouts.sessions import Budget, Chain, chains_of, conversations_of
from trl.rollouts.tool_loop import CALLS, FAILED_OF, LIMITED
from trl.rollouts.tools import FAILURES
from trl.tensors.ragged import Ragged

logger = logging.getLogger(__name__)
REWARD_FIELD, ENVIRONMENTS = "agent_reward", "environments"
MOST_OUTPUT = 1 << 20  # bytes of a command's output

Agent = Callable[..., Awaitable[Any]] | Sequence[str] | str
"""`async def agent(row, base_url, api_key)`, or a command with `{base_url}`, `{api_key}` and `{row}` in its words."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How sessions run: `concurrency` of them at once, each for at most `deadline` seconds (None: no limit), within a `budget`."""

    concurrency: int = 64
    deadline: float | None = None
    budget: Budget | None = None


class AgentCompleter:
    """Completes rows by running an agent, or an environment, on each: a `Completer`. A row's completion is what its session holds.

    The agent's result is its reward: a number, None, or a dict with `reward`. An agent that raises, takes too long or never asks
    the policy has none; such rows are counted. Sessions that a `journal` holds are not run again. With `graded` reward functions
    give rewards too, so a command may print anything.

    Raises: TypeError for an agent that is neither an async function of (row, base_url, api_key) nor a command.
    """

    exact = True

    def __init__(
        self,
        agent: Agent | EnvironmentAgent,
        processing_class: ProcessingClass,
        settings: AgentSettings,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        journal: Journal | None = None,
        graded: bool = False,
    ) -> None:
        self.environments = agent if isinstance(agent, EnvironmentAgent) else None
        self.agent = agent.play if isinstance(agent, EnvironmentAgent) else check_agent(agent, graded=graded)
        self.journal = journal
        self.reward_names = [REWARD_FIELD] if self.environments is None else self.environments.reward_names
        self.adds = [] if self.environments is None else [ENVIRONMENTS]  # columns for reward functions
        self.processing_class, self.settings, self.template_kwargs = (
            processing_class,
            settings,
            template_kwargs,
        )
        self._calls = AsyncCalls("agent")
        self._told: set[str] = set()

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        names = [name for name in rows if name != PROMPT_IDS]
        each = [{name: rows[name][row] for name in names} for row in range(len(streams))]
        if self.environments is not None:
            self.environments.begin()
        keys, known = [], {}
        if self.journal is not None:
            engine, precision = type(maker.engine).__name__, maker.accelerator.mixed_precision
            drawn = maker.sampling, self.settings.budget, self.template_kwargs, engine, precision
            keys = [self.journal.key(*one, *drawn) for one in zip(streams, each, strict=True)]
        if self.journal is not None and not getattr(self.environments, "keeps", False):
            known = self.journal.found(keys)
        played = {place: Played.of_record(record) for place, record in known.items()}
        wanted = {
            place: (streams[place], each[place]) for place in range(len(streams)) if place not in played
        }

        def ended(place: int, one: Played) -> None:
            played[place] = one
            if self.journal is not None:
                self.journal.write(keys[place], each[place], one.record())

        # Weights that are sharded are gathered by all processes, also by those whose sessions have all ended.
        if any(gather_object([bool(wanted)])) if maker.engine.together else wanted:
            self._run(maker, wanted, ended)
        sampling = maker.sampling
        keeps = (sampling.truncates_distribution or bool(sampling.processors)) and maker.engine.exact
        every = [played[place] for place in range(len(streams))]
        found = completed(every, text_tokenizer(self.processing_class), keeps=keeps)
        return found if self.environments is None else with_environments(found, every, self.environments)

    def _run(
        self,
        maker: RolloutMaker,
        wanted: Mapping[int, tuple[int, Mapping[str, Any]]],
        ended: Callable[[int, Played], None],
    ) -> None:
        """Run a session for each stream and row. `ended` is called in this thread when one has ended."""
        gate = asyncio.Semaphore(self.settings.concurrency)
        options: Any = {"sampling": maker.sampling, "template_kwargs": self.template_kwargs}
        with Endpoint(
            maker.engine, self.processing_class, threaded=False, most_sessions=len(wanted), **options
        ) as endpoint:
            running = dict[int, tuple[OpenSession, Pending]]()

            def all_ended() -> bool:
                for place in [place for place, (_, call) in running.items() if call.future.done()]:
                    session, call = running.pop(place)
                    episodes = {} if self.environments is None else self.environments.episodes
                    one = Played.of(session, call, episodes.get(session.api_key))
                    self._tell(session, one.error)
                    ended(place, one)
                return not running

            for place, (stream, row) in wanted.items():
                session = endpoint.session(
                    row, stream=stream, budget=self.settings.budget, version=maker.step
                )
                running[place] = session, self._calls.submit(self._play(session, gate), None)
            for _, call in running.values():
                call.future.add_done_callback(lambda _: endpoint.broker.wake())
            try:
                with maker.accelerator.autocast():
                    endpoint.run(all_ended)
            finally:
                for _, call in running.values():
                    call.future.cancel()

    def _tell(self, session: OpenSession, error: BaseException | None) -> None:
        """Log the first error of each type."""
        if error is not None and (kind := type(error).__name__) not in self._told:
            self._told.add(kind)
            lines = "".join(traceback.format_exception(error)).replace(session.api_key, "***")
            logger.warning("An agent raised an error; further ones of this type are only counted:\n%s", lines)

    async def _play(self, session: OpenSession, gate: asyncio.Semaphore) -> Any:
        async with gate:
            try:
                return await asyncio.wait_for(self.agent(session), self.settings.deadline)
            except TimeoutError as error:
                if self.settings.deadline is None:
                    raise
                raise DeadlinePassed(f"took more than {self.settings.deadline:g} s") from error


def check_agent(given: Any, *, graded: bool = False) -> Callable[[OpenSession], Awaitable[Any]]:
    """The agent as a coroutine function of a session; see `AgentCompleter`.

    Raises: TypeError for another kind of object.
    """
    if isinstance(given, str) or (
        isinstance(given, Sequence) and all(isinstance(word, str) for word in given)
    ):
        words = shlex.split(given) if isinstance(given, str) else list(given)
        if not any("{base_url}" in word for word in words):
            raise TypeError(f"agent={words}: a command needs '{{base_url}}' among its words.")
        return lambda session: _run_command(words, session, graded=graded)
    agent: Any = given
    called = getattr(type(agent), "__call__", None)  # noqa: B004 - of an object that is called as a function
    if not (inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(called)):
        raise TypeError(
            f"agent must be an async function of (row, base_url, api_key), or a command, got {type(agent).__name__}."
        )
    try:
        inspect.signature(agent).bind({}, "", "")
    except TypeError as error:
        raise TypeError(f"agent must be a function of (row, base_url, api_key): {error}.") from None
    return lambda session: agent(session.row, session.base_url, session.api_key)


async def _run_command(words: Sequence[str], session: OpenSession, *, graded: bool) -> Any:
    """The JSON value in the last line that a command prints; else the line, or None if `graded`. Its environment has the address and key too."""
    given = {
        "base_url": session.base_url, "api_key": session.api_key, "row": json.dumps(session.row, default=str),
    }  # fmt: skip
    line = [_filled(word, given) for word in words]
    environment = os.environ | {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key}
    process = await asyncio.create_subprocess_exec(
        *line, env=environment, start_new_session=True, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(
            f"{words[0]} ended with status {process.returncode}: {err[-500:].decode(errors='replace')}"
        )
    last = out[-MOST_OUTPUT:].decode(errors="replace").strip().splitlines()[-1:] or ["null"]
    try:
        return json.loads(last[0])
    except ValueError:
        return None if graded else last[0]


def _filled(word: str, given: Mapping[str, str]) -> str:
    for name, value in given.items():
        word = word.replace(f"{{{name}}}", value)
    return word


@dataclass(slots=True)
class Played:
    """A session that has ended: its chains, the reward under its name, why it failed, and its conversations.

    `messages` are what the policy wrote, in an environment with its answers. `calls` to `limited` count an environment's tool calls.
    """

    chains: list[Chain]
    messages: list[dict[str, Any]]
    turns: int
    cut: bool
    reward: float | None = None
    reward_name: str = REWARD_FIELD
    failure: Outcome | None = None
    error: BaseException | None = None
    conversations: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    call_failures: dict[str, int] = field(default_factory=dict)
    limited: bool = False
    environment: Any = None

    @classmethod
    def of(cls, session: OpenSession, call: Pending, episode: Episode | None = None) -> Played:
        """What the session holds, and the agent's result."""
        turns = session.turns
        written = [turn.written for turn in turns]
        messages = [
            {"role": "assistant", "content": one.text, **({"tool_calls": one.tool_calls} if one.tool_calls else {})}
            for one in written
        ]  # fmt: skip
        played = cls(chains_of(turns), messages, len(turns), session.session.cut is not None)
        played.conversations = conversations_of(turns)
        if episode is not None:
            played.messages, played.environment = episode.messages or messages, episode.environment
            played.calls, played.limited = episode.calls, episode.limited
            played.call_failures, played.reward_name = dict(episode.failures), episode.kind.name
        try:
            result = call.future.result()
        except DeadlinePassed:
            played.failure = "deadline"
        except BaseException as error:
            if played.cut and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                return played  # the client was told that the budget is spent
            played.failure, played.error = "raised", error
        else:
            played._take(result)
        if played.failure is None and not turns:
            played.reward, played.failure = None, "silent"
        return played

    def _take(self, result: Any) -> None:
        reward = result.get("reward") if isinstance(result, Mapping) else result
        if reward is None:
            return
        if isinstance(reward, Real) and math.isfinite(float(reward)):
            self.reward = float(reward)
        else:
            self.failure = "malformed"

    def record(self) -> dict[str, Any]:
        """All of it but the error and the environment, as JSON values."""
        found = {name: getattr(self, name) for name in _RECORDED}
        return {**found, "chains": [chain.record() for chain in self.chains]}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Played:
        """The inverse of `record`."""
        found = {name: record[name] for name in _RECORDED}
        return cls(chains=[Chain.of_record(each) for each in record["chains"]], **found)


_RECORDED = (
    "messages", "turns", "cut", "reward", "reward_name", "failure", "conversations", "calls", "call_failures", "limited",
)  # fmt: skip


def completed(played: Sequence[Played], tokenizer: Any, *, keeps: bool) -> Completed:
    """Sessions as completions. Tokens that the policy did not sample have a log-prob of 0 and count as tool output.

    `keeps`: whether samples have the mass that truncated sampling kept.
    """
    end = tokenizer.eos_token_id or 0
    silent = Chain([end], [end], [False], [1])
    rows = [one.chains or [silent] for one in played]
    flat = [chain for chains in rows for chain in chains]
    parts = [part for chain in flat for part in chain.parts]
    sampled = [part for part in parts if isinstance(part, Generated)]
    dtype = sampled[0].logps.dtype if sampled else torch.float32

    def column(read: Callable[[Generated], Any]) -> torch.Tensor:
        return torch.cat([
            read(part) if isinstance(part, Generated) else torch.zeros(part, dtype=dtype) for part in parts
        ])  # fmt: skip

    per_token = {
        SAMPLING_LOGPS: column(lambda part: part.logps),
        TOOL_OUTPUT: torch.tensor([not mark for chain in flat for mark in chain.sampled]),
    }
    if keeps:
        per_token[SAMPLING_KEPT] = column(lambda part: part.kept)
    per_row = {
        STOPPED: torch.tensor(
            [
                all(chain.ended for chain in chains) and not (one.cut or one.limited)
                for chains, one in zip(rows, played, strict=True)
            ]
        ),
        TURNS: torch.tensor([one.turns for one in played]),
        CHAINS: torch.tensor([len(one.chains) for one in played]),
        CUT: torch.tensor([one.cut for one in played]),
        **{OUTCOME_OF + kind: torch.tensor([one.failure == kind for one in played]) for kind in OUTCOMES},
    }
    experience = Experience(
        Ragged.of([chains[0].prompt for chains in rows]),
        Ragged.of([[token for chain in chains for token in chain.ids] for chains in rows]),
        per_token,
        per_row,
        {BRANCHES: Ragged.of([_branches(chains) for chains in rows])},
    )
    messages = [one.messages or [{"role": "assistant", "content": ""}] for one in played]
    return Completed(experience, {REWARD_FIELD: [one.reward for one in played]}, messages=messages)


def with_environments(
    found: Completed, played: Sequence[Played], environments: EnvironmentAgent
) -> Completed:
    """With the numbers of tool calls, the rewards of each class of environments, and the environments."""
    counts = {
        CALLS: torch.tensor([one.calls for one in played]),
        LIMITED: torch.tensor([one.limited for one in played]),
        **{FAILED_OF + kind: torch.tensor([one.call_failures.get(kind, 0) for one in played]) for kind in FAILURES},
    }  # fmt: skip
    rewards = {
        name: [one.reward if one.reward_name == name else None for one in played]
        for name in environments.reward_names
    }
    fields = {**rewards, ENVIRONMENTS: [one.environment for one in played]}
    return found._replace(experience=found.experience.with_rows(**counts), fields=fields)


def _branches(chains: Sequence[Chain]) -> list[int]:
    """A row of `BRANCHES`."""
    found, place = [], 0
    for before, chain in pairwise(chains):
        place += len(before.ids)
        found += [place, len(chain.prompt), *chain.prompt]
    return found
