"""Counts of the completion tokens of a run by what became of them, over all processes."""

import logging
from collections.abc import Callable, Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from trl.rollouts.experience import (
    ADVANTAGE,
    CORRECTION,
    FILTERED,
    REPLAYED,
    SCORES,
    STOPPED,
    TOOL_OUTPUT,
    TRAINED,
    Experience,
)

logger = logging.getLogger(__name__)

TRUNCATED = "truncated"
BUCKETS: tuple[str, ...] = (TOOL_OUTPUT, TRUNCATED, "reward_failed", FILTERED, "masked", "zero_advantage", "trained")
"""A token counts in the first bucket that applies."""

METRIC = "tokens/"
_WHY = {
    "zero_advantage": "the rewards of each group are equal (see dynamic_sampling and num_generations)",
    TRUNCATED: "completions reached max_completion_length (see mask_truncated_completions)",
    "reward_failed": "every reward function returned None",
    "masked": "the sampler's probabilities differ too much from the trainer's (see vllm_importance_sampling_cap)",
}


def token_ledger(advantages: Tensor, claims: Mapping[str, Tensor]) -> Tensor:
    """The number of completion tokens in each of `BUCKETS`, int64; they add up to K.

    `claims` are the tokens `(K,)` of a bucket by its name, bool; of all others those are trained whose advantage is not
    0.

    Raises: ValueError for an advantage that is NaN and would count.

    >>> token_ledger(torch.tensor([1.0, 0.0, 0.0, -2.0]), {"truncated": torch.tensor([False, False, True, True])})
    tensor([0, 2, 0, 0, 0, 1, 1])
    """
    trained = len(BUCKETS) - 1
    bucket = torch.where(advantages == 0, trained - 1, trained)
    for number, name in reversed(list(enumerate(BUCKETS))):
        if name in claims:
            bucket[claims[name].bool()] = number
    if advantages[bucket == trained].isnan().any():
        raise ValueError("advantages of trained tokens must not be NaN. Mark those tokens as reward_failed.")
    return bucket.bincount(minlength=len(BUCKETS))


def token_advantages(rows: Experience) -> Tensor:
    """The advantage of each completion token `(K,)`, or that of its row."""
    if ADVANTAGE in rows.per_token:
        return rows.per_token[ADVANTAGE]
    return rows.per_row[ADVANTAGE][rows.completions.row_index]


class TokenCounts:
    """The completion tokens in each bucket so far, over all processes, which must count together.

    `count_sampled` is given the number of sampled tokens of prompts and completions, 0-dim.
    """

    def __init__(
        self, accelerator: Accelerator, count_sampled: Callable[[Tensor], object], *, masks_truncated: bool
    ) -> None:
        self._accelerator, self._count_sampled, self._masks_truncated = accelerator, count_sampled, masks_truncated
        self._warned: set[str] = set()
        self._counts = dict.fromkeys(BUCKETS, 0)

    def add(self, rows: Experience, advantages: Tensor) -> dict[str, int]:
        """Count sampled rows of this process, with their tokens' `advantages (K,)`, but not those out of a buffer.

        Returns the counts added by all processes.
        """
        lengths = rows.prompts.lengths + rows.completions.lengths
        self._count_sampled((lengths[~rows.per_row[REPLAYED].bool()] if REPLAYED in rows.per_row else lengths).sum())
        return self._note(self._of(rows, advantages))

    def discard(self, rows: Experience) -> None:
        """Count sampled rows that are not learned from."""
        self.add(rows, torch.zeros(len(rows.completions.values)))

    def mask(self, rows: Experience, chosen: Tensor, *, copies: int = 1) -> None:
        """Move tokens of counted rows, which so many processes have, that are not `chosen (K,)` to `masked`."""
        advantages = token_advantages(rows)
        self._note(self._of(rows, advantages, chosen) - self._of(rows, advantages), copies=copies)

    def _of(self, rows: Experience, advantages: Tensor, chosen: Tensor | None = None) -> Tensor:
        per_row, index, used = rows.per_row, rows.completions.row_index, rows.per_token[TRAINED].bool()
        if CORRECTION in rows.per_token:
            used = used & (rows.per_token[CORRECTION] != 0)
        if chosen is not None:  # in an optimiser step
            used = used & chosen
        sampled = ~per_row[REPLAYED].bool()[index] if REPLAYED in per_row else torch.ones_like(index).bool()
        claims: dict[str, Tensor] = {"reward_failed": per_row[SCORES].isnan()[index], "masked": ~used}
        if TOOL_OUTPUT in rows.per_token:
            claims[TOOL_OUTPUT] = rows.per_token[TOOL_OUTPUT]
        if self._masks_truncated:
            claims[TRUNCATED] = ~per_row[STOPPED].bool()[index]
        if FILTERED in per_row:
            claims[FILTERED] = per_row[FILTERED][index]
        return token_ledger(advantages[sampled], {name: claim[sampled] for name, claim in claims.items()})

    def _note(self, counts: Tensor, *, copies: int = 1) -> dict[str, int]:
        if self._accelerator.num_processes > 1:
            counts = self._accelerator.reduce(counts.to(self._accelerator.device), reduction="sum")  # type: ignore[assignment]
        added = dict(zip(BUCKETS, (counts // copies).tolist(), strict=True))
        self._counts = {name: count + added[name] for name, count in self._counts.items()}
        return added

    def warn_untrained(self, added: Mapping[str, int]) -> None:
        """Warn, once for each reason, that no token of a batch of completions is trained."""
        reasons = {name: count for name, count in added.items() if count and name in _WHY}
        if added["trained"] or not reasons:
            return
        why = max(reasons, key=lambda name: reasons[name])
        if why not in self._warned:
            self._warned.add(why)
            counts = ", ".join(f"{name} {count}" for name, count in added.items() if count)
            message = (
                "No token of a batch of completions is trained (%s): for most, %s. Logged once; counted in tokens/%s."
            )
            logger.warning(message, counts, _WHY[why], why)

    def warn_only_kl_differs(self, beta: float, *, metric: str) -> None:
        """Warn, once, that completions of a batch only differ by their KL penalty."""
        if "kl" not in self._warned:
            self._warned.add("kl")
            logger.warning(
                "In a batch of completions %s: they only differ by the KL penalty (beta=%s). "
                "Logged once; counted in %s.",
                _WHY["zero_advantage"],
                beta,
                metric,
            )

    def logged(self) -> dict[str, float]:
        """`tokens/<bucket>` of the run so far, of `trained` and buckets that are not empty."""
        counts = self._counts.items()
        return {f"{METRIC}{name}": float(count) for name, count in counts if count or name == "trained"}

    def state(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return dict(self._counts)

    def load_state(self, state: Mapping[str, int]) -> None:
        """Restore `state`."""
        self._counts = {name: state.get(name, 0) for name in BUCKETS}
