"""Rollouts of a run: which prompts are drawn, who completes them, and how the completions are scored."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase, TrainerState

from trl.data.formats import is_list_of_dicts_with
from trl.data.prompts import IMAGE_KEY, PROMPT_IDS
from trl.data.rendering import Json, Message
from trl.data.streaming import RowStream
from trl.generation.engine import Engine, Sampling
from trl.generation.vllm.engine import PolicyCopy
from trl.reporting.deadlines import Pending, start
from trl.rewards.result import RewardInputs, RewardResult, joined, source_columns
from trl.rewards.source import RewardSources
from trl.rollouts.experience import SAMPLING_KEPT, SAMPLING_LOGPS, STOPPED, Experience, concatenate
from trl.rollouts.schedule import RolloutSizes, rollout_rows
from trl.tensors.ragged import Ragged

_EVALUATION_SEED = 0x5EED  # evaluations draw other completions than training, and the same ones every time
Rows = Mapping[str, Sequence[Any]]
"""Columns of some rows of a data set."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a run: tokenised rows, `per_batch` of them in each rollout batch, drawn by the seed alone."""

    rows: Dataset | RowStream
    per_batch: int
    seed: int
    shuffle: bool = True

    def of_batch(self, number: int) -> list[int]:
        """The rows of a data set, or the positions in a stream, of rollout batch `number`."""
        if isinstance(self.rows, RowStream):
            return list(range(number * self.per_batch, (number + 1) * self.per_batch))
        return rollout_rows(number, self.per_batch, dataset=len(self.rows), seed=self.seed, shuffle=self.shuffle)


class Completed(NamedTuple):
    """Completions of some rows, and what their maker adds to the rows for reward functions.

    `fields`: further columns; `messages`: each completion as messages, where it has several; `scored` is given the
    rewards; `lost` (bool `(B,)`): rows whose session failed, which are not scored; `failure`: its first error.
    """

    experience: Experience
    fields: Mapping[str, Sequence[Any]] = {}
    messages: Sequence[list[Json]] | None = None
    scored: Callable[[Sequence[float]], None] | None = None
    lost: Tensor | None = None
    failure: str = ""


class Completer(Protocol):
    """Completes rows of prompts; `streams` name the random numbers of each row.

    An attribute `adds` names the columns that it adds for reward functions; None: whatever they take.
    """

    exact: bool
    """Whether the log-probs are those of the engine."""

    def __call__(self, maker: "RolloutMaker", rows: Rows, *, streams: Sequence[int]) -> Completed: ...


class TextCompleter:
    """Completes tokenised prompts by the policy."""

    exact = True

    def __call__(self, maker: "RolloutMaker", rows: Rows, *, streams: Sequence[int]) -> Completed:
        return Completed(maker.complete(rows[PROMPT_IDS], streams=streams))


def check_completer(completer: Completer) -> None:
    """Raise TypeError for an object that cannot complete."""
    if not (callable(completer) and isinstance(getattr(completer, "exact", None), bool)):
        raise TypeError(
            "completer must have an attribute exact (True or False) and be called as "
            f"completer(maker, rows, streams=streams), got {completer!r}."
        )


class NumberedRows(TorchDataset[Mapping[str, Any]]):
    """Rows of a data set, each `copies` times in turn, with their numbers in a column `row`."""

    def __init__(self, dataset: Dataset, copies: int) -> None:
        self.dataset, self.copies = dataset, copies

    def __len__(self) -> int:
        return len(self.dataset) * self.copies

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index // self.copies], "row": index}


class ApplyRewards(Protocol):
    """`OnlineMethod.apply_rewards`."""

    def __call__(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience: ...


class RolloutMaker:
    """Makes rewarded completions. The same seed and batch number give the same rows, in any number of processes.

    `refill` replaces rows of a rollout batch by its number. With `parts` > 1 a rollout batch is completed in that many
    parts, and the rewards of a part are computed on a thread while the next part is completed. `follow` brings the
    policy's weights to the engine. `texts` holds prompt and completion of each row of the newest rollout.
    """

    def __init__(
        self,
        prompts: Prompts,
        sizes: RolloutSizes,
        *,
        engine: Engine,
        sampling: Sampling,
        rewards: RewardSources,
        apply_rewards: ApplyRewards,
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Accelerator,
        completer: Completer | None = None,
        refill: "Callable[[RolloutMaker, Experience, int], Experience] | None" = None,
        parts: int = 1,
    ) -> None:
        self.prompts, self.sizes = prompts, sizes
        self.engine, self.sampling = engine, sampling
        self.rewards, self.apply_rewards = rewards, apply_rewards
        self.tokenizer, self.accelerator = tokenizer, accelerator
        self.completer, self.refill, self.parts = completer or TextCompleter(), refill, parts
        # The columns that reward functions are given:
        self._columns = [name for name in prompts.rows.column_names if name not in (PROMPT_IDS, "prompt", IMAGE_KEY)]
        self.texts: list[tuple[Any, Any]] = []
        self._state: TrainerState | None = None

    @property
    def step(self) -> int:
        """The optimiser step of the weights that generate."""
        assert self._state is not None
        return self._state.global_step

    def follow(self, model: nn.Module | None, state: TrainerState) -> None:
        """Generate with the present weights of `model` from now on; `state` is the trainer's, for reward functions."""
        assert model is not None
        self._state = state
        self.engine.sync_weights(model, state.global_step)

    def forget_weights(self) -> None:
        """Make an engine with a copy of the policy load it again."""
        if isinstance(self.engine, PolicyCopy):
            self.engine.forget()

    def make(self, number: int) -> Experience:
        """This process's completions of rollout batch `number`, with their rewards."""
        local_count, first = self.sizes.own_rows, self.accelerator.process_index * self.sizes.own_rows
        rows = [prompt for prompt in self.prompts.of_batch(number) for _ in range(self.sizes.group)]
        streams = range(number * self.sizes.rows + first, number * self.sizes.rows + first + local_count)
        experience = self.roll_out(self.prompts.rows[rows[first : first + local_count]], streams=streams)
        return experience if self.refill is None else self.refill(self, experience, number)

    def evaluate(self, rows: Sequence[Mapping[str, Any]]) -> Experience:
        """Completions of some `NumberedRows`, scored: the same ones in every evaluation, but not those of training."""
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        streams = [_EVALUATION_SEED * 2**32 + row for row in columns.pop("row")]
        return self.roll_out(columns, streams=streams, training=False)

    def check_columns(self, *datasets: Dataset | RowStream) -> None:
        """Raise ValueError for a reward function with an argument that no column of one of the data sets gives."""
        RewardInputs((), (), columns=dict.fromkeys(self._columns, ()))  # raises for the names of other arguments
        adds = getattr(self.completer, "adds", ())
        if adds is None:
            return
        added = [*getattr(self.completer, "reward_names", ()), *adds]
        for rows in datasets:
            self.rewards.check_columns([*(name for name in self._columns if name in rows.column_names), *added])

    def close(self) -> None:
        """Close the environments of the completer, if it has some."""
        if (close := getattr(self.completer, "close", None)) is not None:
            close()

    def roll_out(self, rows: Rows, *, streams: Sequence[int], training: bool = True) -> Experience:
        """Completions of some rows, scored by each source, with the columns that the method makes of the sums."""
        groups = math.ceil(len(streams) / self.sizes.group)
        size = math.ceil(groups / (self.parts if training else 1)) * self.sizes.group
        completed: list[Completed] = []
        inputs: list[RewardInputs] = []
        pending: list[Pending] = []
        for first in range(0, len(streams), size):
            part = {name: values[first : first + size] for name, values in rows.items()}
            answer = self.completer(self, part, streams=streams[first : first + size])
            if not isinstance(answer, Completed) or len(answer.experience) != len(streams[first : first + size]):
                count = len(answer.experience) if isinstance(answer, Completed) else type(answer).__name__
                raise ValueError(f"completer must return Completed with one completion per row, got {count}.")
            completed.append(answer)
            inputs.append(self.inputs(answer, part))
            if size < len(streams):
                score = partial(self._score_after, pending[-1:], inputs[-1], answer.lost)
                pending.append(start(score, "rewards-of-a-part"))
        if training and completed[0].lost is not None:
            self._check_sessions(completed)
        results = [part.future.result() for part in pending] or [self.rewards.score(inputs[0], lost=completed[0].lost)]
        scored = list[Experience]()
        for answer, result in zip(completed, results, strict=True):
            scored.append(answer.experience.with_rows(**source_columns(result)))
            if answer.scored is not None:
                answer.scored(result.rewards.tolist())
        experience, every, rewards = scored[0], inputs[0], results[0].rewards
        if len(scored) > 1:
            experience, every = concatenate(scored), joined(inputs)
            rewards = torch.cat([result.rewards for result in results])
        self.texts = list(zip(every.prompts, every.completions, strict=True))
        return self.apply_rewards(experience, rewards, every, training=training)

    def _check_sessions(self, completed: Sequence[Completed]) -> None:
        """Raise RuntimeError if all sessions of agents failed, in all processes."""
        are_failed = all(bool(one.lost.all()) for one in completed if one.lost is not None)
        processes = gather_object([(are_failed, [one.failure for one in completed])])
        if all(is_failed for is_failed, _ in processes):
            cause = next((text for _, texts in processes for text in texts if text), "logged before")
            raise RuntimeError(
                "All sessions of a rollout batch failed, so there is nothing to learn. The first error: "
                f"{cause.rstrip('.')}. Correct the agent, and resume the run."
            )

    def _score_after(self, earlier: Sequence[Pending], inputs: RewardInputs, lost: Tensor | None) -> RewardResult:
        """The scores of a part, once the part before it has its own: sources are called in the same order each time."""
        for part in earlier:
            part.future.result()
        return self.rewards.score(inputs, lost=lost)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        streams: Sequence[int],
        sampling: Sampling | None = None,
        **inputs: Any,
    ) -> Experience:
        """One completion of each prompt by the policy, on the CPU; `inputs` go to the engine's `generate`.

        Per token: `sampling_logps` under the distribution that was sampled from, and if it was truncated
        `sampling_kept`, the log of the kept mass. Per row: `stopped`, whether a stop token or string ended it.
        """
        with self.accelerator.autocast():
            answers = self.engine.generate(prompts, sampling or self.sampling, streams=streams, **inputs)
        per_token = {SAMPLING_LOGPS: torch.cat([answer.logps for answer in answers])}
        kept = [answer.kept for answer in answers if answer.kept is not None]
        if len(kept) == len(answers):
            per_token[SAMPLING_KEPT] = torch.cat(kept)
        stopped = torch.tensor([answer.finish_reason == "stop" for answer in answers])
        completions = Ragged.of([answer.ids for answer in answers])
        return Experience(Ragged.of(prompts), completions, per_token, {STOPPED: stopped})

    def inputs(self, completed: Completed, rows: Rows) -> RewardInputs:
        """What reward sources are given: completions as text, or as messages if prompts are messages.

        A message that the prompt begins is part of the completion. Without a column `prompt`, prompts are the text of
        their tokens.
        """
        experience, rows = completed.experience, {**rows, **completed.fields}
        prompt_ids, completion_ids = (
            [row.tolist() for row in ragged.split()] for ragged in (experience.prompts, experience.completions)
        )
        prompts = rows.get("prompt")
        completions: Sequence[Any] = self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        if prompts is None:
            prompts = self.tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
        if len(prompts) and is_list_of_dicts_with(prompts[0], "role"):
            prompts, begun = zip(*map(split_begun, prompts), strict=True)
            answers = map("".join, zip(begun, completions, strict=True))
            completions = [[{"role": "assistant", "content": answer}] for answer in answers]
        if completed.messages is not None:
            completions = [with_begun(*pair) for pair in zip(rows["prompt"], completed.messages, strict=True)]
        columns = {name: list(rows[name]) for name in (*self._columns, *completed.fields) if name in rows}
        return RewardInputs(
            list(prompts), list(completions), completion_ids, prompt_ids, columns=columns, trainer_state=self._state
        )  # fmt: skip


def split_begun(prompt: Sequence[Message]) -> tuple[list[Message], str]:
    """The messages before the assistant's last one, and the text of that one; all messages and "" without one.

    >>> split_begun([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<think>"}])
    ([{'role': 'user', 'content': 'Why?'}], '<think>')
    """
    if prompt[-1].get("role") != "assistant":
        return list(prompt), ""
    content = prompt[-1].get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return list(prompt[:-1]), "".join(parts)


def with_begun(prompt: Sequence[Message] | str, messages: Sequence[Message]) -> list[Message]:
    """A completion of several messages, of which the first includes its beginning in a prompt of messages."""
    if isinstance(prompt, str):
        return list(messages)
    begun, content = split_begun(prompt)[1], str(messages[0].get("content") or "")
    if content.startswith(begun):  # a response template may include it
        return list(messages)
    return [{**messages[0], "content": begun + content}, *messages[1:]]


def less_penalty(scores: Tensor, experience: Experience, penalty: float | None, *, token: int | None) -> Tensor:
    """Scores `(B,)`, less the penalty in rows that neither stopped nor contain this token."""
    if penalty is None:
        return scores
    hits = torch.zeros(len(experience), dtype=torch.int64)
    if token is not None:
        is_token = experience.completions.values == token
        hits.index_add_(0, experience.completions.row_index, is_token.long())
    return scores - penalty * (~experience.per_row[STOPPED].bool() & (hits == 0)).to(scores.dtype)
