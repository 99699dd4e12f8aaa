"""The statistics of a step of PPO by their documented names, and warnings about its KL divergence."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trl.objectives.advantages import TokenRewards, rollout_metrics
from trl.objectives.value import explained_variance
from trl.reporting.metrics import MetricSums
from trl.tensors.moments import Moments, moments
from trl.tensors.reduce import where_counted

logger = logging.getLogger(__name__)

NEGATIVE = -1.0  # nats per response below which more than chance speaks
FAR = 10.0  # times the target: the controller has lost it
EXPLODED = 20.0  # nats per token: policy and reference have nothing in common

_GENERATION = (
    "Sample from the plain distribution (do_sample=True, top_k=0, top_p=1.0, min_length=-1): with other settings the policy is "
    "rewarded for tokens that generation cut away."
)
_ADVICE = "Lower learning_rate or ppo_epochs, raise init_kl_coef, set early_stopping or max_grad_norm, or check the rewards."

Statistics = Mapping[str, Tensor]
_LISTS = ("policy/advantages", "policy/ratio")


class MinibatchRecord:
    """What the minibatches of a step reported, each with its number of tokens.

    A value of the step is the mean over its optimiser steps; of those, means are over all tokens of all their
    minibatches and processes, and variances are those of all their tokens.
    """

    def __init__(self) -> None:
        self._found: list[list[tuple[float, Statistics]]] = []

    def begin(self) -> None:
        """A new optimiser step."""
        self._found.append([])

    def add(self, tokens: int, statistics: Statistics) -> None:
        """What one minibatch of the current optimiser step reported; all processes report the same names."""
        self._found[-1].append((float(tokens), statistics))

    def last(self, name: str, accelerator: Any) -> float:
        """One value of the latest optimiser step, over all its minibatches and processes, which must all call it."""
        sums = torch.tensor([[count * float(found[name]), count] for count, found in self._found[-1]])
        total, count = accelerator.reduce(sums.sum(dim=0).to(accelerator.device), reduction="sum").tolist()
        return total / count

    def summary(self, accelerator: Any) -> dict[str, Tensor]:
        """The step's values by name; lists are this process's, one after another. All processes must call it."""
        every = [entry for step in self._found for entry in step]
        lists = {
            name: torch.cat([found[name].flatten() for _, found in every])
            for name in _LISTS
            if name in every[0][1]
        }
        names = [name for name in every[0][1] if name not in lists]
        rows = [
            torch.stack(
                [torch.tensor(count).double(), *(found[name].detach().double().cpu() for name in names)]
            )
            for count, found in every
        ]
        table = torch.stack(rows).view(len(self._found), -1, 1 + len(names))
        table = _beside_other_processes(table, accelerator)
        merged = [_merged(names, step) for step in table]
        means = {name: torch.stack([values[name] for values in merged]).mean() for name in names}
        return {**means, **lists}


def _beside_other_processes(table: Tensor, accelerator: Any) -> Tensor:
    """`(optimiser steps, minibatches, columns)` with the minibatches of all processes."""
    if accelerator.num_processes == 1:
        return table
    every = accelerator.gather(table.to(accelerator.device)[None]).cpu()
    return every.transpose(0, 1).flatten(1, 2)


def _merged(names: Sequence[str], table: Tensor) -> dict[str, Tensor]:
    """One optimiser step's values from its minibatches' `(M, 1 + names)`: counts, then values."""
    counts, columns = table[:, 0], dict(zip(names, table[:, 1:].T, strict=True))
    merged = {name: (column * counts).sum() / counts.sum() for name, column in columns.items()}
    for name, column in columns.items():
        if name.endswith("/var"):
            means = columns[f"{name.removesuffix('/var')}/mean"]
            parts = [
                Moments(count, mean, where_counted(variance * (count - 1), count > 1))
                for count, mean, variance in zip(counts, means, column, strict=True)
            ]
            whole = parts[0]
            for part in parts[1:]:
                whole = whole.plus(part)
            merged[name] = whole.variance
    return merged


def step_statistics(
    *,
    kl_coef: float,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    non_score_reward: Tensor,
    kls: Tensor,
    masks: Tensor,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    train_stats: Statistics,
    accelerator: Any,
) -> dict[str, Any]:
    """All documented statistics of a step but its times.

    `scores (B,)`; `logprobs`, `ref_logprobs`, `non_score_reward`, `kls`, `masks` `(B, R)`. Values per response are those of
    all processes, log-probs of single tokens this process's.
    """
    counted = masks != 0
    sums = MetricSums()
    sums.add_all(
        rollout_metrics(TokenRewards(non_score_reward, non_score_reward), kls, logprobs, scores, masks)
    )
    columns = {
        "kl": where_counted(kls, counted).sum(dim=1),
        "scores": scores,
        "queries": scores.new_tensor([len(query) for query in queries]),
        "responses": scores.new_tensor([len(response) for response in responses]),
    }
    table = accelerator.gather(torch.stack([column.double() for column in columns.values()], dim=1))
    of = dict(zip(columns, table.T, strict=True))
    found: dict[str, Any] = {
        **sums.drain(accelerator),
        "objective/kl_dist": of["kl"],
        "objective/kl_coef": kl_coef,
        "objective/logprobs": logprobs[counted],
        "objective/ref_logprobs": ref_logprobs[counted],
        "ppo/std_scores": moments(of["scores"]).variance.sqrt(),
    }
    for name in ("queries", "responses"):
        found[f"tokens/{name}_len_mean"] = of[name].mean()
        found[f"tokens/{name}_len_std"] = moments(of[name]).variance.sqrt()
        found[f"tokens/{name}_dist"] = of[name]
    found |= {f"ppo/{name}": value for name, value in train_stats.items()}
    if "ppo/val/error" in found:
        error, variance = float(found["ppo/val/error"]), float(found["ppo/returns/var"])
        found["ppo/val/var_explained"] = explained_variance(error, variance)
    return found


class DivergenceWatch:
    """Looks at each step's divergence before the update; each warning is given once."""

    def __init__(self, target: float) -> None:
        self.target = target
        self._said: set[str] = set()

    def check(self, kl: float, per_token: float, *, step: int) -> None:
        """`kl` in nats per response, `per_token` the mean size of a token's log-ratio, both over all processes.

        Raises: FloatingPointError where the policy has left the reference for good, or either is no number.
        """
        if not math.isfinite(kl) or not math.isfinite(per_token) or per_token > EXPLODED:
            raise FloatingPointError(
                f"the KL divergence from the reference has exploded in step {step}: {kl:.4g} nats per response, {per_token:.4g} "
                f"per token (at most {EXPLODED:g}). No update was made; go on from the last state that was saved. {_ADVICE}"
            )
        if kl < NEGATIVE:
            self._say(
                "negative",
                f"The KL divergence is negative ({kl:.3g} nats per response in step {step}), which training can exploit. "
                f"{_GENERATION}",
            )
        if kl > FAR * self.target:
            self._say(
                "far",
                f"The KL divergence is {kl:.3g} nats per response in step {step}, {FAR:g} times the target of {self.target:g}. "
                f"{_ADVICE}",
            )

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(message)


def mean_over_rows(values: Tensor, mask: Tensor, accelerator: object) -> tuple[float, float]:
    """Mean sum per row, and mean size per token where the mask is not 0, of all processes."""
    counted = torch.where(mask != 0, values.detach().double(), 0.0)
    sums = torch.stack(
        [
            counted.sum(),
            counted.new_tensor(float(len(values))),
            counted.abs().sum(),
            (mask != 0).sum().to(counted.dtype),
        ]
    )
    total, rows, size, tokens = accelerator.reduce(sums, reduction="sum").tolist()  # type: ignore[attr-defined]
    return total / rows, size / tokens
