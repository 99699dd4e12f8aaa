"""Dynamic sampling: groups whose rewards are all equal teach nothing; other prompts are sampled in their place.

Source: Yu et al. 2025, DAPO, section 3.2 (arXiv:2503.14476).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl.rollouts.experience import Experience, concatenate
from trl.rollouts.maker import RolloutMaker
from trl.rollouts.measures import of_all_processes
from trl.rollouts.schedule import refill_rng_streams, refill_rows, rows_of_groups
from trl.tensors.reduce import Weighted

Texts = list[tuple[Any, Any]]


class Refill:
    """Replaces groups that teach nothing, in at most `rounds` rounds of sampling.

    `lacks_variance` says, of the columns per row of whole groups, which groups teach nothing: bool `(N / G,)`.
    `discard` counts sampled rows that are not learned from; all processes call it alike.
    """

    def __init__(
        self,
        rounds: int,
        *,
        lacks_variance: Callable[[Mapping[str, Tensor]], Tensor],
        discard: Callable[[Experience], object],
    ) -> None:
        self.rounds, self.lacks_variance, self.discard = rounds, lacks_variance, discard
        self.measured: dict[str, Weighted] = {}

    def __call__(self, maker: RolloutMaker, experience: Experience, number: int) -> Experience:
        """This process's rows of rollout batch `number`, with other groups for those that teach nothing.

        In each round as many prompts are sampled as groups are missing, in equal parts by the processes, wherever in
        the batch they are to stand. Those that show no difference either are not taken. All processes must call it.
        """
        prompts, sizes, taken = maker.prompts, maker.sizes, maker.prompts.of_batch(number)
        turn, drawn, texts, rows = 0, 0, maker.texts, len(prompts.rows)  # type: ignore[arg-type]
        missing = self.lacks_variance(of_all_processes(experience, maker.accelerator)).nonzero()[:, 0]
        while len(missing) and turn < self.rounds:
            turn += 1
            chosen = refill_rows(number, drawn, len(missing), taken=taken, dataset=rows, seed=prompts.seed)
            drawn += len(chosen)
            slots = rows_of_groups(missing, sizes.group)
            streams = refill_rng_streams(turn, slots.tolist(), sizes, batch=number)
            replacements, more = _sampled(maker, chosen, streams)
            useful = ~self.lacks_variance(replacements.per_row)
            experience, texts = self._placed(maker, (experience, texts), (replacements, more), slots, useful)
            missing = missing[~useful]
        maker.texts = texts
        share = torch.tensor(1 / sizes.processes)
        measured = {"rounds": turn, "sampled_groups": drawn, "kept_zero_groups": len(missing)}
        self.measured = {f"dynamic_sampling/{name}": Weighted(value * share, share) for name, value in measured.items()}
        return experience

    def _placed(
        self,
        maker: RolloutMaker,
        kept: tuple[Experience, Texts],
        replacements: tuple[Experience, Texts],
        slots: Tensor,
        useful: Tensor,
    ) -> tuple[Experience, Texts]:
        """This process's rows with the `replacements` for `slots` of the batch, where their group is `useful`."""
        (old, texts), (new, more) = kept, replacements
        local_count = maker.sizes.own_rows
        here = (slots // local_count == maker.accelerator.process_index).nonzero()[:, 0]
        taken = useful[here // maker.sizes.group]
        placed, at = here[taken], slots[here[taken]] % local_count
        self.discard(concatenate([old.take(at), new.take(here[~taken])]))
        source = torch.arange(len(old))
        source[at] = len(old) + placed
        every = [*texts, *more]
        return concatenate([old, new]).take(source), [every[row] for row in source.tolist()]


def _sampled(maker: RolloutMaker, prompts: Sequence[int], streams: Sequence[int]) -> tuple[Experience, Texts]:
    """Rewarded completions of groups of these rows, all of them on every process, and their texts.

    Every process samples as many whole groups: the last processes may sample the last group too.
    """
    processes, size = maker.sizes.processes, maker.sizes.group
    local_count = math.ceil(len(prompts) / processes)
    first = maker.accelerator.process_index * local_count
    groups = torch.arange(first, first + local_count).clamp(max=len(prompts) - 1)
    experience = maker.roll_out(
        maker.prompts.rows[[prompts[group] for group in groups.repeat_interleave(size).tolist()]],
        streams=[streams[row] for row in rows_of_groups(groups, size).tolist()],
    )
    parts: list[Any] = [(experience, maker.texts)]
    parts = gather_object(parts) if processes > 1 else parts
    whole = concatenate([part for part, _ in parts]).take(torch.arange(len(streams)))
    return whole, [text for _, texts in parts for text in texts]
