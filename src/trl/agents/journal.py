"""Sessions that have ended, and a journal of them, so that a run that was stopped does not run them again."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from trl.agents.chains import Chain, chains_of, conversations_of, in_order
from trl.agents.sessions import Session
from trl.agents.tools import Reply
from trl.data.rendering import Fields, Json
from trl.models.distributed import is_sharded
from trl.reporting.deadlines import DeadlinePassed
from trl.rewards.result import RewardError, read_answers
from trl.rollouts.measures import Outcome
from trl.rollouts.schedule import digest

REWARD_FIELD = "agent_reward"


@dataclass(slots=True)
class Played:
    """A session, or a row with tools: its chains, the reward under its name, why it failed, and its conversations.

    `results` are numbers beside the reward, `messages` those of policy, tools and `environment`; then counts of calls.
    """

    chains: list[Chain] = field(default_factory=list)
    messages: list[Json] = field(default_factory=list)
    conversations: list[Json] = field(default_factory=list)
    turns: int = 0
    cut: bool = False
    reward: float | None = None
    reward_name: str = REWARD_FIELD
    failure: Outcome | None = None
    results: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    limited: bool = False
    environment: Any = None

    def count(self, reply: Reply) -> None:
        self.calls += 1
        if reply.failure is not None:
            self.failures[reply.failure] = self.failures.get(reply.failure, 0) + 1

    def end(self, session: Session, result: Future[object]) -> BaseException | None:
        """Take what the session holds, and the agent's result; the error that it failed with, if any."""
        turns, self.reward = in_order(session.turns), None
        self.chains, self.conversations = chains_of(turns), conversations_of(turns)
        self.turns, self.cut = len(turns), session.cut is not None
        self.messages = self.messages or [turn.message for turn in turns]
        try:
            answer = result.result()
        except DeadlinePassed as error:
            self.failure = "deadline"
            return error
        except BaseException as error:
            if self.cut and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                return None  # the client was told that the budget is spent
            self.failure = "raised"
            return error
        reward = answer["reward"] if isinstance(answer, Mapping) and "reward" in answer else answer
        read = read_answers([reward], count=1)
        if read.unusable:
            self.failure = "malformed"
            return RewardError(f"It gave {read.unusable[0]}, not a number, None or a dict with 'reward'.")
        if not turns:
            self.failure = "silent"
            return RewardError("It ended without an answer of the policy: there is nothing to train.")
        (self.reward,) = read.values
        if isinstance(answer, Mapping):
            others = {str(name): value for name, value in answer.items() if name != "reward"}
            values = read_answers(list(others.values()), count=len(others)).values
            self.results = {n: value for n, value in zip(others, values, strict=True) if value is not None}
        return None


class Journal:
    """Records of sessions in files of `folder` (None: none), one for each step, run and process.

    A record belongs to the run, step, weights, random stream, row and sampling settings. `prune` deletes what a
    checkpoint does not need, unless the journal `keeps` all. With `environments`, their classes, a record has the
    session's: its `__getstate__()`, if that is JSON. Sessions whose environment cannot be restored are run again.
    """

    def __init__(
        self, folder: Path | None, *, rank: int, keeps: bool = False, environments: Sequence[type] = ()
    ) -> None:
        self.folder, self.rank, self.keeps = folder, rank, keeps
        self.environments = {_path(kind): kind for kind in environments}
        self._held: dict[str, Json] = {}
        self._file: Path | None = None
        self._step, self._policy = 0, ""

    @contextmanager
    def writing(self, step: int, model: nn.Module, *, run: str | None) -> Iterator[None]:
        """Around a rollout batch of a run: reads sessions that have ended, and takes others. All processes enter it."""
        if self.folder is not None:
            trained = (_local(parameter) for parameter in model.parameters() if parameter.requires_grad)
            sums = [[parameter.sum(dtype=torch.float64).item() for parameter in trained]]
            self._step = step
            self._policy = digest([run, step, gather_object(sums) if is_sharded(model) else sums])
            name = f"{step:08d}-{run}"
            records = _records(self.folder, f"{name}-*.jsonl")
            held = {record["key"]: record for record in records if "row" in record}
            # A batch of failures ends the run. It is run again, because their cause may be gone.
            self._held = held if any(record["failure"] is None for record in held.values()) else {}
            self._file = self.folder / f"{name}-{self.rank}.jsonl"
        yield
        self._held, self._file = {}, None

    def key(self, stream: int, row: Fields, *settings: object) -> str:
        return digest([self._policy, stream, row, settings])

    def recorded(self, key: str) -> Played | None:
        """The session of a key that has ended; None if it must be run."""
        if (record := self._held.get(key)) is None:
            return None
        values = {item.name: record[item.name] for item in fields(Played) if item.name in record}
        values["chains"] = [Chain(**chain) for chain in values["chains"]]
        if self.environments:
            try:
                name, state = values["environment"]
                values["environment"] = environment = object.__new__(self.environments[name])
                restore = getattr(environment, "__setstate__", None)
                vars(environment).update(state or {}) if restore is None else restore(state)
            except Exception:  # of any kind, by the user's classes
                return None
        return Played(**values)

    def write(self, key: str, row: Fields, played: Played) -> None:
        """Append a session, if it has no record."""
        if self._file is None or key in self._held:
            return
        plain = asdict(replace(played, environment=None))
        whole = {"step": self._step, "row": dict(row), **plain}
        if self.environments:
            with suppress(Exception):  # of any kind: it is not restored, then
                state = [_path(type(played.environment)), played.environment.__getstate__()]
                if json.loads(json.dumps(state)) == state:
                    whole["environment"] = state
        self._append({key: whole})

    def score(self, keys: Sequence[str], rewards: Sequence[float]) -> None:
        """Append the rewards of sessions by all sources, NaN for none."""
        pairs = zip(keys, rewards, strict=True)
        self._append({key: {"reward": None if math.isnan(reward) else reward} for key, reward in pairs})

    def _append(self, records: Mapping[str, Fields]) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            for key, record in records.items():  # on a new line, even if the last one is torn
                file.write("\n" + json.dumps({"key": key, **record}, default=str))

    def prune(self, step: int, *, run: str | None) -> None:
        """Delete this process's records of earlier steps and of other runs."""
        if self.keeps or self.folder is None:
            return
        for file in list(self.folder.glob(f"*-{self.rank}.jsonl")):
            if int(file.name.partition("-")[0]) < step or f"-{run}-" not in file.name:
                file.unlink()


def read_sessions(folder: str | Path) -> Iterator[Json]:
    """The records of a journal: `step`, `row`, `reward` (the weighted sum), `conversations` and more."""
    sessions: dict[str, Json] = {}
    for record in _records(folder, "*.jsonl"):
        sessions.setdefault(record["key"], {}).update(record)
    yield from (record for record in sessions.values() if "row" in record)


def _records(folder: str | Path, files: str) -> Iterator[Json]:
    for file in sorted(Path(folder).glob(files)):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):  # an empty line, or half of one
                yield json.loads(line)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This process's part of a parameter: its shard under FSDP2 and ZeRO-3."""
    held = getattr(parameter, "ds_tensor", parameter).detach()
    return held.to_local() if isinstance(held, DTensor) else held
