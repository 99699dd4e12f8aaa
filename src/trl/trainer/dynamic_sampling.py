"""Groups whose rewards are all equal teach nothing: other prompts are sampled in their place.

Source: Yu et al. 2025, DAPO, section 3.2 (arXiv:2503.14476).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl.rollouts.experience import Experience, concatenate
from trl.rollouts.group_window import rows_of_groups
from trl.rollouts.measures import of_all_processes
from trl.rollouts.schedule import refill_rows, refill_streams
from trl.tensors.reduce import Weighted


def refilled(
    trainer: Any, experience: Experience, number: int, taken: Sequence[int]
) -> tuple[Experience, dict[str, Weighted]]:
    """Window `number` with other groups for those without a difference in reward, and what is logged of it.

    `experience`: this process's rows, judged; `taken`: the window's prompts, as rows of the data set. In each of at most
    `max_resampling_rounds` rounds as many prompts are sampled as groups are missing, in equal parts by the processes, wherever
    in the window they are to stand. Those that show no difference either are not taken. What is not learned from is counted
    (`discard`). All processes must call it.
    """
    size, texts, turn, drawn = trainer.sizes.group, trainer._shown.texts, 0, 0
    rows: Any = trainer._rows()
    missing = trainer.lacks_variance(of_all_processes(experience, trainer.accelerator)).nonzero()[:, 0]
    while len(missing) and turn < trainer.args.max_resampling_rounds:
        turn += 1
        prompts = refill_rows(
            number, drawn, len(missing), taken=taken, dataset=len(rows), seed=trainer._data_seed()
        )
        drawn += len(prompts)
        slots = rows_of_groups(missing, size)
        streams = refill_streams(turn, slots.tolist(), trainer.sizes, window=number)
        found, more = _sampled(trainer, prompts, streams)
        useful = ~trainer.lacks_variance(found.per_row)
        experience, texts = _placed(trainer, (experience, texts), (found, more), slots, useful)
        missing = missing[~useful]
    trainer._shown.texts = texts
    measured = {"rounds": turn, "sampled_groups": drawn, "kept_zero_groups": len(missing)}
    share = torch.tensor(1 / trainer.args.world_size)
    return experience, {
        f"dynamic_sampling/{name}": Weighted(value * share, share) for name, value in measured.items()
    }


def _sampled(trainer: Any, prompts: Sequence[int], streams: Sequence[int]) -> tuple[Experience, list[Any]]:
    """Judged completions of groups of these prompts (rows of the data set), all of them on every process, and their texts.

    Every process samples as many whole groups: where that does not come out even, the last ones sample the last group too.
    """
    processes, size = trainer.args.world_size, trainer.sizes.group
    own = math.ceil(len(prompts) / processes)
    first = trainer.args.process_index * own
    groups = torch.arange(first, first + own).clamp(max=len(prompts) - 1)
    found = trainer.judged_completions(
        trainer._rows()[[prompts[group] for group in groups.repeat_interleave(size).tolist()]],
        streams=[streams[row] for row in rows_of_groups(groups, size).tolist()],
    )
    parts: list[Any] = [(found, trainer._shown.texts)]
    parts = gather_object(parts) if processes > 1 else parts
    whole = concatenate([part for part, _ in parts]).take(torch.arange(len(streams)))
    return whole, [text for _, texts in parts for text in texts]


def _placed(
    trainer: Any,
    kept: tuple[Experience, list[Any]],
    found: tuple[Experience, list[Any]],
    slots: Tensor,
    useful: Tensor,
) -> tuple[Experience, list[Any]]:
    """This process's rows with those that were `found` for `slots` of the window, where their group is `useful`."""
    (old, texts), (new, more) = kept, found
    own = trainer.sizes.own_rows
    here = (slots // own == trainer.args.process_index).nonzero()[:, 0]
    taken = useful[here // trainer.sizes.group]
    placed, at = here[taken], slots[here[taken]] % own
    trainer.discard(concatenate([old.take(at), new.take(here[~taken])]))
    source = torch.arange(len(old))
    source[at] = len(old) + placed
    every = [*texts, *more]
    return concatenate([old, new]).take(source), [every[row] for row in source.tolist()]
