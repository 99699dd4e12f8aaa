"""Sizes of rollout batches of GRPO and related methods, whose completions come in groups of one prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from trl.rollouts.schedule import RolloutSizes


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of a config that determine the sizes; `processes` share every micro-batch."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    processes: int
    num_generations: int
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    num_iterations: int = 1

    @property
    def turn(self) -> int:
        """Rows of a micro-batch, over all processes."""
        return self.per_device_train_batch_size * self.processes

    @property
    def whole(self) -> int:
        """Rows of the smallest batch of whole optimiser steps and whole groups."""
        return math.lcm(self.turn * self.gradient_accumulation_steps, self.num_generations)

    @property
    def made_of(self) -> str:
        """The settings of a micro-batch, for messages."""
        several = "es" if self.processes > 1 else ""
        return f"per_device_train_batch_size={self.per_device_train_batch_size} and {self.processes} process{several}"


class GroupSizes(NamedTuple):
    """The sizes of a rollout batch, and both settings of a generation."""

    sizes: RolloutSizes
    generation_batch_size: int
    steps_per_generation: int


def group_sizes(settings: GroupSettings) -> GroupSizes:
    """The rollout batch of a configuration, in rows (completions).

    If `steps_per_generation` is no multiple of an optimiser step's micro-batches, a rollout batch has several generations.

    Raises: ValueError for numbers that do not divide, with those that would.

    >>> found = group_sizes(GroupSettings(4, 2, processes=1, num_generations=8))
    >>> found.generation_batch_size, found.steps_per_generation, found.sizes.steps
    (8, 2, 1)
    """
    steps, accumulated = _steps(settings), settings.gradient_accumulation_steps
    generated = settings.turn * steps
    _check_groups(generated, settings)
    micro_batches = math.lcm(steps, accumulated)
    sizes = RolloutSizes(
        rows=settings.turn * micro_batches,
        mini_batches=micro_batches // accumulated,
        passes=settings.num_iterations,
        micro_batches=accumulated,
        processes=settings.processes,
    )
    return GroupSizes(sizes, generated, steps)


def kept_sizes(sizes: RolloutSizes, keep: int) -> RolloutSizes:
    """How the `keep` best completions of each of a rollout batch's groups are cut into the same optimiser steps.

    Raises ValueError where a process has parts of groups, or the kept do not divide into its micro-batches, with the numbers
    that would.

    >>> sizes = RolloutSizes(rows=16, mini_batches=2, passes=1, micro_batches=1, processes=1, group=8)
    >>> kept_sizes(sizes, 3).rows
    6
    """
    if sizes.own_rows % sizes.group:
        whole = math.lcm(sizes.mini_batches * sizes.micro_batches, sizes.group) * sizes.processes
        raise ValueError(
            f"each of {sizes.processes} processes generates {sizes.own_rows} completions at once, expected a multiple of "
            f"num_generations={sizes.group}: a group is filtered where it is generated. "
            f"{_nearest('Set generation_batch_size to', sizes.rows, whole)}."
        )
    groups, cuts = sizes.own_rows // sizes.group, sizes.mini_batches * sizes.micro_batches
    if groups * keep % cuts:
        would = [str(number) for number in range(2, sizes.group) if groups * number % cuts == 0]
        choice = f"Set num_remains_in_group to {' or '.join(would)}, or " if would else "Set "
        raise ValueError(
            f"num_remains_in_group={keep} leaves {groups * keep} completions of {groups} groups to each process, expected a "
            f"multiple of its {cuts} micro-batches of one generation. {choice}per_device_train_batch_size to a multiple of "
            f"num_generations={sizes.group}."
        )
    return replace(sizes, rows=groups * keep * sizes.processes, group=keep)


def check_evaluation(rows: int, num_generations: int) -> None:
    """Raise ValueError if an evaluation batch of all processes, in rows, does not contain whole groups."""
    if rows % num_generations:
        raise ValueError(
            f"an evaluation batch has {rows} completions (per_device_eval_batch_size times the number of processes), expected a "
            f"multiple of num_generations_eval={num_generations}. Set num_generations_eval to {_divisors(rows, least=1)}, or "
            "another per_device_eval_batch_size."
        )


def rows_of_groups(groups: Tensor, size: int) -> Tensor:
    """The rows of some groups of `size` neighbouring rows, in order.

    >>> rows_of_groups(torch.tensor([2, 0]), 2)
    tensor([4, 5, 0, 1])
    """
    return (groups[:, None] * size + torch.arange(size)).flatten()


def _steps(settings: GroupSettings) -> int:
    """Micro-batches per generation."""
    given, steps, turn = settings.generation_batch_size, settings.steps_per_generation, settings.turn
    if given is None:
        return settings.gradient_accumulation_steps if steps is None else steps
    if steps is not None and given != turn * steps:
        raise ValueError(
            f"generation_batch_size={given} and steps_per_generation={steps} disagree: {settings.made_of} make the latter "
            f"{turn * steps} completions. Leave one of them out."
        )
    if given % turn:
        raise ValueError(
            f"generation_batch_size={given} must be a multiple of {turn}, the rows of a micro-batch ({settings.made_of}). "
            f"{_nearest('Set it to', given, settings.whole)}."
        )
    return given // turn


def _check_groups(generated: int, settings: GroupSettings) -> None:
    """Whole groups are generated at once."""
    size = settings.num_generations
    if generated % size == 0:
        return
    divisors = _divisors(generated)
    choice = f"Set num_generations to {divisors}, or " if divisors else "Set "
    raise ValueError(
        f"{generated} completions are generated at once (generation_batch_size; {settings.made_of}), expected a multiple of "
        f"num_generations={size}. {choice}{_nearest('generation_batch_size to', generated, settings.whole)}."
    )


def _divisors(number: int, least: int = 2) -> str:
    """The divisors of a number from `least` on, for messages."""
    found = [str(divisor) for divisor in range(least, number + 1) if number % divisor == 0]
    return " or ".join(found[-6:])


def _nearest(verb: str, given: int, unit: int) -> str:
    """The nearest multiples of `unit`, for messages."""
    below = given // unit * unit
    return f"{verb} {' or '.join(str(value) for value in (below, below + unit) if value > 0)}"
