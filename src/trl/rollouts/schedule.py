"""The sizes of a rollout batch, and the rows of each of them and of each optimiser step, as functions of the seed.

There is no state, so the rows are the same after resuming and for any number of processes.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from trl.options.checks import check_at_least

logger = logging.getLogger(__name__)

_MINI_BATCHES, _REFILLS, _REPLAYS = 1, 2, 3  # random streams
_ROUND = 2**48  # larger than the streams of rollout batches and evaluations


@dataclass(frozen=True, slots=True)
class RolloutSizes:
    """The sizes of a rollout batch, in rows and optimiser steps.

    `rows`: over all processes. `mini_batches`: optimiser steps per pass over the rows; `passes`: over the rows.
    `micro_batches`: per optimiser step; `processes`: that share the rows. `group`: rows of one prompt.
    """

    rows: int
    mini_batches: int
    passes: int
    micro_batches: int
    processes: int
    group: int = 1

    @property
    def prompts(self) -> int:
        """Prompts of the rollout batch, over all processes."""
        return self.rows // self.group

    @property
    def together(self) -> int:
        """Rows of one prompt in one mini-batch: whole groups, or their largest equal parts."""
        return math.gcd(self.group, self.own_rows // self.mini_batches)

    @property
    def steps(self) -> int:
        """Optimiser steps of a rollout batch."""
        return self.mini_batches * self.passes

    @property
    def cut(self) -> dict[str, int]:
        """What decides which rows a step learns from, beside the seed."""
        together = self.together if self.mini_batches > 1 else self.group
        return {"rows": self.rows, "steps": self.steps, "together": together}

    @property
    def own_rows(self) -> int:
        """Rows of one process."""
        return self.rows // self.processes

    def facts(self, step: int, *, seed: int) -> dict[str, int]:
        """The identity of the rollout batch that optimiser step number `step` of a run trains on."""
        return {"window": step // self.steps, "rows": self.rows, "steps": self.steps, "seed": seed}


class GroupSizes(NamedTuple):
    """The sizes of a rollout batch, and both settings of a generation."""

    sizes: RolloutSizes
    generation_batch_size: int
    steps_per_generation: int


def group_sizes(args: Any) -> GroupSizes:
    """The rollout batch of a config, in rows (completions); a micro-batch of one process has `args.device_rows`.

    If `steps_per_generation` is no multiple of a step's micro-batches, a rollout batch has several generations.

    Raises: ValueError for numbers that do not divide, with those that would.
    """
    rows = args.device_rows * max(args.data_processes, 1)
    accumulated = args.gradient_accumulation_steps
    batch_size, steps = args.generation_batch_size, args.steps_per_generation
    if steps is None:
        steps = accumulated if batch_size is None else batch_size // rows
    generated, whole = rows * steps, math.lcm(rows * accumulated, args.num_generations)
    if batch_size not in (None, generated):
        raise ValueError(
            f"generation_batch_size={batch_size} must be {rows} * steps_per_generation. "
            f"Set it alone, to a multiple of {whole}."
        )
    if generated % args.num_generations:
        raise ValueError(
            f"{generated} completions must be a multiple of num_generations={args.num_generations}. "
            f"Set generation_batch_size to a multiple of {whole}."
        )
    micro_batches = math.lcm(steps, accumulated)
    if args.device_rows * micro_batches % args.sp_size:
        raise ValueError(
            f"sp_size={args.sp_size} must divide the {args.device_rows * micro_batches} completions that processes "
            "which share tokens generate together. Set steps_per_generation to a multiple of it."
        )
    sizes = RolloutSizes(
        rows=rows * micro_batches,
        mini_batches=micro_batches // accumulated,
        passes=args.num_iterations,
        micro_batches=accumulated,
        processes=args.world_size,
    )
    return GroupSizes(sizes, generated, steps)


def batch_sizes(sizes: RolloutSizes) -> dict[str, int]:
    """The sizes of a rollout batch in rows, by their names in configs of PPO."""
    step, local_step = sizes.rows // sizes.mini_batches, sizes.own_rows // sizes.mini_batches
    return {
        "micro_batch_size": step // sizes.micro_batches,
        "local_mini_batch_size": local_step,
        "mini_batch_size": step,
        "local_batch_size": sizes.own_rows,
        "batch_size": sizes.rows,
    }


def fill_in_sizes(args: Any, sizes: RolloutSizes, rows: int) -> None:
    """Set `total_episodes`, `num_total_batches` and `max_steps` from what was given, in place."""
    lengths = args.max_steps, args.total_episodes
    if None not in lengths and args.max_steps > 0:
        logger.warning("max_steps=%d has no effect with total_episodes=%d. Leave one out.", *lengths)
    elif args.max_steps > 0:
        args.num_total_batches = math.ceil(args.max_steps / sizes.steps)
        args.total_episodes = args.num_total_batches * sizes.rows
        return
    if args.total_episodes is None:
        args.total_episodes = math.ceil(args.num_train_epochs * rows)
    args.num_total_batches = math.ceil(args.total_episodes / sizes.rows)
    args.max_steps = args.num_total_batches * sizes.steps


def kept_sizes(sizes: RolloutSizes, keep: int) -> RolloutSizes:
    """How the `keep` best completions of each of a rollout batch's groups are cut into the same optimiser steps.

    Raises ValueError where a process has parts of groups, or the kept do not divide into its micro-batches.

    >>> sizes = RolloutSizes(rows=16, mini_batches=2, passes=1, micro_batches=1, processes=1, group=8)
    >>> kept_sizes(sizes, 3).rows
    6
    """
    cuts, groups = sizes.mini_batches * sizes.micro_batches, sizes.own_rows // sizes.group
    if sizes.own_rows % sizes.group:
        raise ValueError(
            f"each process generates {sizes.own_rows} completions at once, expected whole groups of {sizes.group}. "
            f"Set generation_batch_size to a multiple of {math.lcm(cuts, sizes.group) * sizes.processes}."
        )
    if groups * keep % cuts:
        raise ValueError(
            f"num_remains_in_group={keep} leaves {groups * keep} completions per process, expected a multiple of "
            f"{cuts}."
        )
    return replace(sizes, rows=groups * keep * sizes.processes, group=keep)


def check_evaluation(rows: int, num_generations: int) -> None:
    """Raise ValueError if an evaluation batch, in rows, does not contain whole groups."""
    if rows % num_generations:
        raise ValueError(
            f"num_generations_eval={num_generations} must divide the {rows} completions of an evaluation batch. Change "
            "per_device_eval_batch_size."
        )


def rows_of_groups(groups: Tensor, size: int) -> Tensor:
    """The rows of some groups of `size` neighbouring rows, in order.

    >>> rows_of_groups(torch.tensor([2, 0]), 2)
    tensor([4, 5, 0, 1])
    """
    return (groups[:, None] * size + torch.arange(size)).flatten()


def rollout_rows(batch: int, rows: int, *, dataset: int, seed: int, shuffle: bool = True) -> list[int]:
    """The data set's rows that rollout batch `batch` is made of.

    Every pass over the `dataset` (its number of rows) is shuffled anew (in order without `shuffle`), and rollout
    batches follow each other across passes: no row is left out, none comes twice in a pass.

    >>> first, second = (rollout_rows(batch, 3, dataset=5, seed=0) for batch in (0, 1))
    >>> sorted(first + second[:2])
    [0, 1, 2, 3, 4]
    """
    if dataset < 1:
        raise ValueError("train_dataset must have at least 1 row, got 0. Check how it was filtered.")
    drawn: list[int] = []
    position = batch * rows
    while len(drawn) < rows:
        order = pass_order(position // dataset, dataset, seed=seed, shuffle=shuffle)
        drawn += order[position % dataset :][: rows - len(drawn)]
        position = batch * rows + len(drawn)
    return drawn


def pass_order(number: int, dataset: int, *, seed: int, shuffle: bool = True) -> list[int]:
    """The order of the data set's rows in pass `number` (0, 1, ...) over them.

    Shuffled passes are successive draws of `torch.randperm` from one generator with the seed, as in TRL.

    >>> pass_order(3, 4, seed=0, shuffle=False)
    [0, 1, 2, 3]
    """
    return _passes(dataset, seed).order(number) if shuffle else list(range(dataset))


@dataclass
class _Passes:
    """Successive draws of `torch.randperm` from one generator; for an earlier pass than the last they begin again."""

    dataset: int
    seed: int
    drawn: int = 0

    def order(self, number: int) -> list[int]:
        if self.drawn == 0 or number < self.drawn - 1:
            self.drawn, self._generator = 0, torch.Generator().manual_seed(self.seed)
        while self.drawn <= number:
            self._order = torch.randperm(self.dataset, generator=self._generator).tolist()
            self.drawn += 1
        return self._order


_passes = lru_cache(maxsize=4)(_Passes)  # successive rollout batches draw each pass once


def refill_rows(batch: int, first: int, count: int, *, taken: Sequence[int], dataset: int, seed: int) -> list[int]:
    """`count` rows of the data set that refill rollout batch `batch`, after the `first` ones drawn for it already.

    In random order all rows that are not `taken` (by the rollout batch itself) and, once they are used up, all rows
    again and again.

    >>> found = [refill_rows(0, first, 2, taken=[1], dataset=5, seed=0) for first in (0, 2)]
    >>> sorted(found[0] + found[1])
    [0, 2, 3, 4]
    """
    drawn: list[int] = []
    number = 0
    while len(drawn) < first + count:
        order = _generator(seed, _REFILLS, batch, number).permutation(dataset).tolist()
        used = set(taken) if number == 0 else set()
        drawn += [row for row in order if row not in used]
        number += 1
    return drawn[first : first + count]


def refill_rng_streams(turn: int, rows: Sequence[int], sizes: RolloutSizes, *, batch: int) -> list[int]:
    """Random streams for rows that are sampled again, in refill `turn` 1, 2, ...: no other row has them."""
    return [turn * _ROUND + batch * sizes.rows + row for row in rows]


def stream_of(stream: int, prompt: Sequence[int], number: int) -> int:
    """The random stream of the completion `number` of a prompt within the row that has a `stream`."""
    return int(digest([stream, list(prompt), number], size=8), 16) >> 1


def digest(value: Any, *, size: int = 16) -> str:
    """A digest of `size` bytes of a JSON value, in hexadecimal digits; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def replayed_groups(batch: int, count: int, *, among: int, seed: int) -> list[int]:
    """Which `count` of `among` groups of earlier rollout batches take part in rollout batch `batch` again, none twice.

    >>> sorted(replayed_groups(7, 3, among=3, seed=0))
    [0, 1, 2]
    """
    return _generator(seed, _REPLAYS, batch).permutation(among)[:count].tolist()


def step_rows(step: int, sizes: RolloutSizes, *, batch: int, process: int, seed: int) -> list[Tensor]:
    """Which of a process's own rows `(own_rows,)` each micro-batch of a rollout batch's optimiser step learns from.

    Each row occurs once in every pass. The rows of the rollout batch (in groups: `together` of them at a time) are
    taken in runs of `mini_batches`, of which each mini-batch gets one at random: so a mini-batch has the same rows
    however many processes share it, as long as each process has whole groups for every mini-batch.

    >>> sizes = RolloutSizes(rows=4, mini_batches=2, passes=1, micro_batches=1, processes=1)
    >>> turns = [step_rows(step, sizes, batch=0, process=0, seed=0)[0] for step in (0, 1)]
    >>> torch.cat(turns).sort().values
    tensor([0, 1, 2, 3])
    """
    number, mini_batch = divmod(step, sizes.mini_batches)
    positions = torch.arange(sizes.own_rows).view(-1, sizes.mini_batches, sizes.together)
    if sizes.mini_batches > 1:
        draws = _generator(seed, _MINI_BATCHES, batch, number).random(
            (len(positions) * sizes.processes, sizes.mini_batches)
        )
        turns = torch.from_numpy(draws.argsort(axis=1))[process * len(positions) : (process + 1) * len(positions)]
        positions = positions.gather(1, turns[:, :, None].expand_as(positions))
    return list(positions[:, mini_batch].flatten().chunk(sizes.micro_batches))


def _generator(seed: int, *stream: int) -> np.random.Generator:
    """A random stream that depends on the seed and these numbers only."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**63, *stream])))


class RepeatSampler(Sampler[int]):
    """Indices of a data set in batches of `batch_size`: each index `mini_repeat_count` times, the batch `repeat_count`
    times.

    Every pass is shuffled by `torch.randperm`, in the order in which GRPO and RLOO draw prompts with the same `seed`
    (None: a random one). An incomplete last batch is dropped (trainers keep it).

    Example:
        >>> sampler = RepeatSampler(
        ...     "abcde", mini_repeat_count=2, batch_size=2, repeat_count=2, shuffle=False
        ... )
        >>> list(sampler)
        [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    """

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        check_at_least("mini_repeat_count", mini_repeat_count, minimum=1, optional=False)
        check_at_least("batch_size", batch_size, minimum=1, optional=False)
        check_at_least("repeat_count", repeat_count, minimum=1, optional=False)
        self.data_source, self.mini_repeat_count = data_source, mini_repeat_count
        self.batch_size, self.repeat_count, self.shuffle = batch_size, repeat_count, shuffle
        self.seed = int(torch.randint(2**31, ())) if seed is None else seed
        self._pass = 0
        self._rows = len(data_source) // batch_size * batch_size  # of a pass

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass number `epoch`."""
        self._pass = epoch

    def __iter__(self) -> Iterator[int]:
        order = pass_order(self._pass, len(self.data_source), seed=self.seed, shuffle=self.shuffle)
        self._pass += 1
        for first in range(0, self._rows, self.batch_size):
            for _ in range(self.repeat_count):
                for index in order[first : first + self.batch_size]:
                    yield from [index] * self.mini_repeat_count

    def __len__(self) -> int:
        return self._rows * self.mini_repeat_count * self.repeat_count
