"""Rollouts by agents: each row is a session of an agent with the policy, over an OpenAI-style endpoint."""

import asyncio
import copy
import inspect
import json
import logging
import math
import os
import shlex
import shutil
import signal
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from tempfile import TemporaryFile
from typing import Any

import torch
from accelerate.utils import gather_object

from trl.agents.chains import Chain, experience_of
from trl.agents.endpoint import Endpoint
from trl.agents.environments import NO_PROMPT, EnvironmentAgent
from trl.agents.journal import REWARD_FIELD, Journal, Played
from trl.agents.sessions import Budget, Session
from trl.agents.tool_loop import tool_counts
from trl.data.prompts import PROMPT_IDS
from trl.data.rendering import Fields, ProcessingClass, text_tokenizer
from trl.options.generation import AgentSampling
from trl.reporting.deadlines import AsyncCalls, DeadlinePassed, bounded
from trl.rollouts.experience import BRANCHES, RESULT_OF, STOPPED
from trl.rollouts.maker import Completed, RolloutMaker, Rows
from trl.rollouts.measures import CHAINS, CUT, OUTCOME_OF, OUTCOMES, TURNS
from trl.tensors.ragged import Ragged

logger = logging.getLogger(__name__)
ENVIRONMENTS = "environments"
CLOSING_SECONDS = 10.0  # for the `close` of environments
MOST_OUTPUT = 1 << 20  # bytes of a command's output that are read
# Ends a command's process group when the trainer, its parent, has ended, even by SIGKILL.
_WATCH = "read -r _; kill -9 -$0"
_LAUNCH = 'read -r _ && exec "$@" </dev/fd/$0'  # not before it is watched

Agent = Callable[..., Awaitable[object]] | Sequence[str] | str
"""`async def agent(row, base_url, api_key)`, or a command with `{base_url}`, `{api_key}` and `{row}` in its words."""


class AgentCompleter:
    """Completes rows by running an agent, or an environment, on each: a `Completer`; completions are sessions.

    `concurrency` sessions run at once, each for at most `deadline` seconds (None: no limit), within a `budget`. The
    agent's result is its reward: a number, None, or a dict with `reward`; failed or silent agents have none and are
    counted. Sessions in the `journal` are not run again. With `graded` a command may print anything. Raises: TypeError.
    """

    def __init__(
        self, agent: Agent | EnvironmentAgent, processing_class: ProcessingClass, budget: Budget, *, concurrency: int,
        deadline: float | None, journal: Journal, template_kwargs: Fields | None = None, graded: bool = False,
        agent_sampling: AgentSampling = "own", host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        self.agent_sampling: AgentSampling = agent_sampling
        self.exact, self.host = agent_sampling != "agent", host
        self.environments = agent if isinstance(agent, EnvironmentAgent) else None
        self.agent = agent.play if isinstance(agent, EnvironmentAgent) else check_agent(agent, graded=graded)
        self.reward_names = [REWARD_FIELD] if self.environments is None else self.environments.reward_names
        self.adds = [] if self.environments is None else [ENVIRONMENTS]  # columns for reward functions
        self.processing_class, self.template_kwargs, self.journal = processing_class, template_kwargs, journal
        self.concurrency, self.deadline, self.budget, self.graded = concurrency, deadline, budget, graded
        self._calls = AsyncCalls("agent")
        self._told, self._warned, self._failure = set[str](), set[str](), ""
        self._results: set[str] = set()  # names of numbers beside rewards

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        has_prompts = self.environments is not None or rows.get("prompt", [None])[0] != NO_PROMPT
        names = [name for name in rows if name != PROMPT_IDS and (has_prompts or name != "prompt")]
        own_rows = [{name: rows[name][row] for name in names} for row in range(len(streams))]
        self._failure = ""
        if self.environments is not None:
            self.environments.threads.check()
            self.close(ends=False)
        sampling, precision = maker.sampling, maker.accelerator.mixed_precision
        drawn = sampling, self.budget, self.template_kwargs, type(maker.engine).__name__, precision
        keys = [self.journal.key(*pair, *drawn, self.agent_sampling) for pair in zip(streams, own_rows, strict=True)]
        held = {key: self.journal.recorded(key) for key in keys}
        if self.environments is not None:
            self.environments.made += [one.environment for one in held.values() if one is not None]
        sessions = zip(keys, streams, own_rows, strict=True)
        waiting = {key: (stream, row, Played()) for key, stream, row in sessions if held[key] is None}
        # Weights that are sharded are gathered by all processes, also by those whose sessions have all ended.
        if any(gather_object([bool(waiting)])) if maker.engine.together else waiting:
            self._run(maker, waiting)
        truncates = sampling.truncates_distribution or bool(sampling.processors) or not self.exact
        keeps = truncates and maker.engine.exact
        played = [held[key] or waiting[key][-1] for key in keys]
        self._results.update(*gather_object([sorted({name for one in played for name in one.results})]))
        answer = self.completed(played, keeps=keeps)._replace(failure=self._failure)
        return answer._replace(scored=partial(self.journal.score, keys)) if self.graded else answer

    def completed(self, played: Sequence[Played], *, keeps: bool) -> Completed:
        """Sessions as completions, one without turns as an end token; `keeps` as in `experience_of`."""
        end: Any = text_tokenizer(self.processing_class).eos_token_id or 0
        silent = Chain([end])
        silent.add([end])
        rows = [one.chains or [silent] for one in played]
        stopped = [all(chain.ended for chain in chains) for chains in rows]
        columns = {
            STOPPED: [ended and not (one.cut or one.limited) for ended, one in zip(stopped, played, strict=True)],
            TURNS: [one.turns for one in played],
            CHAINS: [len(one.chains) for one in played],
            CUT: [one.cut for one in played],
            **{OUTCOME_OF + kind: [one.failure == kind for one in played] for kind in OUTCOMES},
            **{RESULT_OF + n: [one.results.get(n, math.nan) for one in played] for n in sorted(self._results)},
        }
        fields: dict[str, list[object]] = {
            name: [one.reward if one.reward_name == name else None for one in played] for name in self.reward_names
        }
        if self.environments is not None:
            columns |= tool_counts(played)
            fields[ENVIRONMENTS] = [one.environment for one in played]
        experience = experience_of(rows, columns, keeps=keeps)
        experience = experience.with_more(**{BRANCHES: Ragged.of([_branches(chains) for chains in rows])})
        messages = [one.messages or [{"role": "assistant", "content": ""}] for one in played]
        lost = torch.tensor([one.failure is not None for one in played])
        return Completed(experience, fields, messages=messages, lost=lost)

    def close(self, *, ends: bool = True) -> None:
        """Close environments of failed episodes, or all where training `ends`; the others are free from now on."""
        if self.environments is not None:
            environments, called = self.environments.released(ends=ends), self.environments.called
            calls = [self._calls.submit(called(one.close), CLOSING_SECONDS) for one in environments]
            for result in map(self._calls.outcome, calls):
                if isinstance(result, Exception):
                    logger.warning("An environment could not be closed: %r", result)

    def _run(self, maker: RolloutMaker, waiting: Mapping[str, tuple[int, Fields, Played]]) -> None:
        """Run a session for each stream and row, and write it to the journal under its key."""
        gate = asyncio.Semaphore(self.concurrency)
        endpoint = Endpoint(
            maker.engine, self.processing_class, sampling=maker.sampling, template_kwargs=self.template_kwargs,
            threaded=False, most_sessions=len(waiting), agent_sampling=self.agent_sampling, host=self.host,
            http=self.environments is None, warned=self._warned,  # environments are of this process
        )  # fmt: skip
        with endpoint:
            running = dict[str, tuple[Session, Future[object]]]()

            def all_ended() -> bool:
                for key in [key for key, (_, call) in running.items() if call.done()]:
                    (session, call), (_, row, played) = running.pop(key), waiting[key]
                    self._tell(session, played, played.end(session, call))
                    self.journal.write(key, row, played)
                return not running

            for key, (stream, row, played) in waiting.items():
                prompt_row = copy.deepcopy(row)  # agents append messages to their prompt
                session = endpoint.session(prompt_row, stream=stream, budget=self.budget, version=maker.step)
                call = self._calls.submit(self._play(endpoint, session, played, gate), None).future
                call.add_done_callback(lambda _: endpoint.broker.wake())
                running[key] = session, call
            try:
                with maker.accelerator.autocast(), self._calls.watched():
                    endpoint.run(all_ended)
            finally:
                for _, call in running.values():
                    call.cancel()

    def _tell(self, session: Session, played: Played, error: BaseException | None) -> None:
        """Log the first error of each type, and keep the first of a batch."""
        if error is not None:
            text = f"{played.failure}: {type(error).__name__}: {error}"
            self._failure = self._failure or text.replace(session.api_key, "***")
        if error is not None and (kind := f"{played.failure} {type(error).__name__}") not in self._told:
            self._told.add(kind)
            lines = "".join(traceback.format_exception(error)).replace(session.api_key, "***")
            logger.warning("An agent failed; further failures of this type are only counted:\n%s", lines)

    async def _play(self, endpoint: Endpoint, session: Session, played: Played, gate: asyncio.Semaphore) -> object:
        async with gate:
            try:
                return await bounded(self.agent(session, played), self.deadline)
            except DeadlinePassed:
                raise
            except TimeoutError as error:  # which asyncio would copy without its traceback
                raise RuntimeError("a call of the agent timed out") from error
            finally:
                endpoint.close_session(session)


def check_agent(agent: Any, *, graded: bool = False) -> Callable[[Session, Played], Awaitable[object]]:
    """The agent, called with a session. Raises: TypeError for other objects, FileNotFoundError for no program."""
    if isinstance(agent, (str, list, tuple)):
        words = shlex.split(agent) if isinstance(agent, str) else [str(word) for word in agent]
        if not words or shutil.which(words[0]) is None:
            missing = words[0] if words else ""
            raise FileNotFoundError(f"agent={words}: there is no program {missing!r}. Install it, or give its path.")
        return lambda session, _: _run_command(words, session, graded=graded)
    called = getattr(type(agent), "__call__", None)  # noqa: B004 - of an object that is called as a function
    try:
        inspect.signature(agent).bind({}, "", "")
        if not (inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(called)):
            raise TypeError("it is not async. Use openai.AsyncOpenAI or `await asyncio.to_thread(...)` there")
    except TypeError as error:
        kind = type(agent).__name__
        allowed = "an async function of (row, base_url, api_key), or a command"
        raise TypeError(f"agent must be {allowed}, got {kind}: {error}.") from None
    return lambda session, _: agent(session.row, session.base_url, session.api_key)


async def _run_command(words: Sequence[str], session: Session, *, graded: bool) -> object:
    """The JSON value in a command's last line, or the line (None if `graded`). What it started ends with it."""
    row = json.dumps(session.row, default=str)
    variables = {"base_url": session.base_url, "api_key": session.api_key, "row": row}
    line = list(words)
    for name, value in variables.items():
        line = [word.replace(f"{{{name}}}", value) for word in line]
    environment = os.environ | {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key}
    with TemporaryFile() as given_row, TemporaryFile() as out, TemporaryFile() as err:
        if not any("{row}" in word for word in words):
            given_row.write(row.encode())
            given_row.seek(0)
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", _LAUNCH, str(given_row.fileno()), *line, env=environment, start_new_session=True,
            pass_fds=[given_row.fileno()], stdin=asyncio.subprocess.PIPE, stdout=out, stderr=err,
        )  # fmt: skip
        groups = [process]
        try:
            watch: Any = asyncio.create_subprocess_exec(
                "sh", "-c", _WATCH, str(process.pid), start_new_session=True, stdin=_alive(),
                stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            groups.append(await watch)
            await process.communicate(b"\n")
        finally:
            for leader in groups:
                with suppress(ProcessLookupError):
                    os.killpg(leader.pid, signal.SIGKILL)
                await leader.wait()
        for file in (out, err):
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_OUTPUT))
        said, error = (file.read().decode(errors="replace") for file in (out, err))
    if process.returncode != 0:
        raise RuntimeError(f"{words[0]} ended with status {process.returncode}: {error[-500:]}")
    last = said.strip().splitlines()[-1:] or ["null"]
    try:
        result = json.loads(last[0])
    except ValueError:
        result = last[0]
    is_reward = isinstance(result, (int, float)) or (isinstance(result, dict) and "reward" in result)
    return result if is_reward or not graded else None


@cache
def _alive() -> int:
    """The reading end of a pipe whose other end is open as long as this process lives."""
    reading, writing = os.pipe()
    os.register_at_fork(after_in_child=partial(os.close, writing))  # a child may outlive it
    return reading


def _branches(chains: Sequence[Chain]) -> list[int]:
    row, place = [], 0
    for before, chain in pairwise(chains):
        place += len(before.ids)
        row += [place, len(chain.prompt), *chain.prompt]
    return row
