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
    rows = settings.per_device_train_batch_size * settings.processes
    accumulated = settings.gradient_accumulation_steps
    given, steps = settings.generation_batch_size, settings.steps_per_generation
    if steps is None:
        steps = accumulated if given is None else given // rows
    generated, whole = rows * steps, math.lcm(rows * accumulated, settings.num_generations)
    if given not in (None, generated):
        raise ValueError(
            f"generation_batch_size={given} must be a multiple of per_device_train_batch_size times the processes, {rows}, and times "
            f"steps_per_generation if both are given. Set generation_batch_size alone, to a multiple of {whole}."
        )
    if generated % settings.num_generations:
        raise ValueError(
            f"{generated} completions are generated at once, expected a multiple of num_generations={settings.num_generations}. Set "
            f"generation_batch_size to a multiple of {whole}, or num_generations to a divisor of {generated}."
        )
    micro_batches = math.lcm(steps, accumulated)
    sizes = RolloutSizes(
        rows=rows * micro_batches,
        mini_batches=micro_batches // accumulated,
        passes=settings.num_iterations,
        micro_batches=accumulated,
        processes=settings.processes,
    )
    return GroupSizes(sizes, generated, steps)


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
            f"each of {sizes.processes} processes generates {sizes.own_rows} completions at once, expected whole groups of "
            f"{sizes.group}. Set generation_batch_size to a multiple of {math.lcm(cuts, sizes.group) * sizes.processes}."
        )
    if groups * keep % cuts:
        raise ValueError(
            f"num_remains_in_group={keep} leaves {groups * keep} completions of {groups} groups to each process, expected a multiple "
            f"of its {cuts} micro-batches. Change num_remains_in_group, or set per_device_train_batch_size to a multiple of {sizes.group}."
        )
    return replace(sizes, rows=groups * keep * sizes.processes, group=keep)


def check_evaluation(rows: int, num_generations: int) -> None:
    """Raise ValueError if an evaluation batch of all processes, in rows, does not contain whole groups."""
    if rows % num_generations:
        raise ValueError(
            f"an evaluation batch has {rows} completions over all processes, expected a multiple of num_generations_eval="
            f"{num_generations}. Set num_generations_eval to a divisor of {rows}, or another per_device_eval_batch_size."
        )


def rows_of_groups(groups: Tensor, size: int) -> Tensor:
    """The rows of some groups of `size` neighbouring rows, in order.

    >>> rows_of_groups(torch.tensor([2, 0]), 2)
    tensor([4, 5, 0, 1])
    """
    return (groups[:, None] * size + torch.arange(size)).flatten()
