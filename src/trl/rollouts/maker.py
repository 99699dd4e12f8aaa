"""Rollouts of a run: which prompts are drawn, who completes them, and how the completions are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from datasets import Dataset
from torch import Tensor

from trl.data.prompts import PROMPT_IDS, columns_for_rewards
from trl.data.streaming import RowStream
from trl.generation.engine import Engine, Sampling
from trl.rewards.inputs import RewardInputs
from trl.rewards.result import source_columns
from trl.rewards.source import RewardSources
from trl.rollouts.experience import Experience
from trl.rollouts.sampling import reward_inputs, sample, with_begun
from trl.rollouts.schedule import RolloutSizes, rollout_rows

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
        return rollout_rows(
            number, self.per_batch, dataset=len(self.rows), seed=self.seed, shuffle=self.shuffle
        )

    @property
    def reward_columns(self) -> list[str]:
        """The columns that reward functions are given."""
        return columns_for_rewards(self.rows.column_names)


class Completed(NamedTuple):
    """Completions of some rows, and what their maker adds to the rows for reward functions.

    `fields`: further columns; `messages`: each completion as messages, where it has several.
    """

    experience: Experience
    fields: Mapping[str, Sequence[Any]] = {}
    messages: Sequence[list[dict[str, Any]]] | None = None


class Completer(Protocol):
    """Completes rows of prompts; `streams` name the random numbers of each row."""

    exact: bool
    """Whether the log-probs are those of the engine."""

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed: ...


class TextCompleter:
    """Completes tokenised prompts by the policy."""

    exact = True

    def __call__(self, maker: RolloutMaker, rows: Rows, *, streams: Sequence[int]) -> Completed:
        return Completed(maker.complete(rows[PROMPT_IDS], streams=streams))


class ApplyRewards(Protocol):
    """`OnlineMethod.apply_rewards`."""

    def __call__(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience: ...


class RolloutMaker:
    """Makes rewarded completions. The same seed and batch number give the same rows, in any number of processes.

    `refill` replaces rows of a rollout batch by its number. Before a rollout, `follow` brings the policy's weights to the engine. `texts` holds prompt and completion of each row
    of the newest rollout.
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
        tokenizer: Any,
        accelerator: Any,
        completer: Completer | None = None,
        refill: Callable[[RolloutMaker, Experience, int], Experience] | None = None,
    ) -> None:
        self.prompts, self.sizes = prompts, sizes
        self.engine, self.sampling = engine, sampling
        self.rewards, self.apply_rewards = rewards, apply_rewards
        self.tokenizer, self.accelerator = tokenizer, accelerator
        self.completer, self.refill = completer or TextCompleter(), refill
        self.texts: list[tuple[Any, Any]] = []
        self._state: Any = None

    @property
    def exact(self) -> bool:
        """Whether log-probs of sampling are those of the plain policy in the engine's precision."""
        return self.completer.exact and self.engine.exact and not self.sampling.alters_distribution

    def follow(self, model: Any, state: Any) -> None:
        """Generate with the present weights of `model` from now on; `state` is the trainer's, for reward functions."""
        self._state = state
        self.engine.sync_weights(model, state.global_step)

    def make(self, number: int) -> Experience:
        """This process's completions of rollout batch `number`, with their rewards."""
        own, first = self.sizes.own_rows, self.accelerator.process_index * self.sizes.own_rows
        rows = [prompt for prompt in self.prompts.of_batch(number) for _ in range(self.sizes.group)]
        streams = range(number * self.sizes.rows + first, number * self.sizes.rows + first + own)
        found = self.roll_out(self.prompts.rows[rows[first : first + own]], streams=streams)
        return found if self.refill is None else self.refill(self, found, number)

    def roll_out(self, rows: Rows, *, streams: Sequence[int], training: bool = True) -> Experience:
        """Completions of some rows, with their rewards."""
        found = self.completer(self, rows, streams=streams)
        return self.reward(found, rows, training=training)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        streams: Sequence[int],
        sampling: Sampling | None = None,
        **inputs: Any,
    ) -> Experience:
        """One completion of each prompt by the policy; `inputs` are further arguments of the engine's `generate`."""
        with self.accelerator.autocast():
            return sample(self.engine, prompts, sampling or self.sampling, streams=streams, **inputs)

    def reward(self, found: Completed, rows: Rows, *, training: bool = True) -> Experience:
        """Completions with the score of each source, and the columns that the method makes of their sum."""
        inputs = self.inputs(found, rows)
        self.texts = list(zip(inputs.prompts, inputs.completions, strict=True))
        result = self.rewards.score(inputs)
        experience = found.experience.with_rows(**source_columns(result))
        return self.apply_rewards(experience, result.rewards, inputs, training=training)

    def inputs(self, found: Completed, rows: Rows) -> RewardInputs:
        """What reward sources are given."""
        rows = {**rows, **found.fields}
        known = [*self.prompts.reward_columns, *found.fields]
        inputs = reward_inputs(
            found.experience,
            rows,
            self.tokenizer,
            columns=[name for name in known if name in rows],
            trainer_state=self._state,
        )
        if found.messages is None:
            return inputs
        return replace(inputs, completions=with_begun(rows["prompt"], found.messages))
