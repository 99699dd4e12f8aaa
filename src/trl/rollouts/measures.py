"""Metrics of completions in groups: lengths, rewards, and clipping."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from accelerate import Accelerator
from torch import Tensor

from trl.objectives.group_advantages import Scale, reward_statistics
from trl.reporting.metrics import extreme_of
from trl.rewards.result import score_std, scores_by_source
from trl.rollouts.experience import LENGTH, RESULT_OF, REWARD, STOPPED, TOOL_OUTPUT, Experience
from trl.tensors.reduce import Weighted, weighted

Outcome = Literal["raised", "deadline", "silent", "malformed"]
"""Why a session of an agent has no reward: it raised, took too long, never asked the policy, or returned something
else.
"""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# Columns per row of sessions of agents:
TURNS, CHAINS, CUT, OUTCOME_OF = "agent_turns", "agent_chains", "agent_cut", "agent_failed_"
# Of tool calls:
CALLS, LIMITED, FAILED_OF = "tool_calls", "tool_limited", "tool_failed_"


def of_all_processes(
    experience: Experience, accelerator: Accelerator, *, is_evaluation: bool = False
) -> dict[str, Tensor]:
    """The columns per row and `length` (sampled tokens) of all processes: float64 `(N,)` on the CPU.

    Every process must have the same number of rows; those that accelerate repeats to fill a batch of an evaluation are
    left out.
    """
    columns = {**experience.per_row, LENGTH: sampled_lengths(experience)}
    table = torch.stack([column.double() for column in columns.values()], dim=1)
    if accelerator.num_processes > 1:
        table = accelerator.gather(table.to(accelerator.device))
        table = table[: _rows_read(accelerator) if is_evaluation else None].cpu()
    return dict(zip(columns, table.unbind(dim=1), strict=True))


def local_rows(accelerator: Accelerator, rows: int) -> int:
    """How many of this process's `rows` of an evaluation batch accelerate did not repeat to fill it."""
    count = _rows_read(accelerator)
    return rows if count is None else min(max(count - accelerator.process_index * rows, 0), rows)


def _rows_read(accelerator: Accelerator) -> int | None:
    """The rows of all processes in a last evaluation batch that is not full; None for other batches."""
    state = accelerator.gradient_state
    is_short = accelerator.num_processes > 1 and state.end_of_dataloader and state.remainder > 0
    return state.remainder if is_short else None


def sampled_lengths(experience: Experience) -> Tensor:
    """Tokens of each completion without those of tools: int64 `(B,)`."""
    lengths = experience.completions.lengths
    if TOOL_OUTPUT not in experience.per_token:
        return lengths
    from_tool = experience.per_token[TOOL_OUTPUT].long()
    return lengths - torch.zeros_like(lengths).index_add_(0, experience.completions.row_index, from_tool)


def measured_groups(
    rows: Mapping[str, Tensor], sources: Sequence[str], group_size: int, *, scale: Scale
) -> dict[str, Weighted]:
    """`completions/*`, `rewards/*`, `reward`, `reward_std` and `frac_reward_zero_std` of rows of all processes.

    Means are over rows; minima, maxima and deviations are averaged over batches.
    """
    metrics = measured_lengths(rows)
    for name, column in scores_by_source(rows, sources).items():
        metrics[f"rewards/{name}/mean"] = weighted(column, ~column.isnan())
        if not (std := score_std(column)).isnan():
            metrics[f"rewards/{name}/std"] = weighted(std)
    return metrics | reward_statistics(rows[REWARD], group_size, scale=scale)


def shared(metrics: Mapping[str, Weighted], share: float) -> dict[str, Weighted]:
    """Metrics of which this process logs a `share`."""
    return {name: Weighted(value.total * share, value.count * share) for name, value in metrics.items()}


def measured_lengths(rows: Mapping[str, Tensor]) -> dict[str, Weighted]:
    """`completions/*` of rows of all processes."""
    lengths, stopped = rows[LENGTH], rows[STOPPED] != 0
    metrics = {"completions/clipped_ratio": weighted((~stopped).double())}
    for name, counts in (("", lengths), ("_terminated", lengths[stopped])):
        if len(counts):
            metrics[f"completions/mean{name}_length"] = weighted(counts)
            metrics[f"completions/min{name}_length"] = weighted(counts.min())
            metrics[f"completions/max{name}_length"] = weighted(counts.max())
    return metrics


def split_extremes(metrics: Mapping[str, Weighted]) -> tuple[dict[str, Weighted], dict[str, Tensor]]:
    """Metrics without minima and maxima (`extreme_of` their names), and these."""
    extremes = {name: value.mean for name, value in metrics.items() if extreme_of(name)}
    return {name: value for name, value in metrics.items() if name not in extremes}, extremes


def session_metrics(rows: Mapping[str, Tensor]) -> dict[str, Weighted]:
    """Metrics of tool calls and of agents' sessions in rows of all processes.

    `tools/call_frequency` and `tools/limit_ratio` per completion, `tools/failure_frequency` and `tools/failures/<kind>`
    per call. `agent/turns` and `agent/branches` per session, `agent/cut_ratio`: share of sessions that a budget ended,
    `agent/failures/<kind>`: shares that failed, `agent/<name>/mean` of the numbers beside agents' rewards.
    """
    metrics: dict[str, Weighted] = {}
    if CALLS in rows:
        metrics |= {"tools/call_frequency": weighted(rows[CALLS]), "tools/limit_ratio": weighted(rows[LIMITED])}
        if calls := rows[CALLS].sum():
            failed = {name.removeprefix(FAILED_OF): n.sum() for name, n in rows.items() if name.startswith(FAILED_OF)}
            metrics["tools/failure_frequency"] = Weighted(torch.stack(list(failed.values())).sum(), calls)
            metrics |= {f"tools/failures/{kind}": Weighted(count, calls) for kind, count in failed.items()}
    if TURNS not in rows:
        return metrics
    metrics |= {"agent/turns": weighted(rows[TURNS]), "agent/branches": weighted(rows[CHAINS].clamp(min=1) - 1)}
    metrics["agent/cut_ratio"] = weighted(rows[CUT])
    metrics |= {f"agent/failures/{kind}": weighted(rows[OUTCOME_OF + kind]) for kind in OUTCOMES}
    for name, values in rows.items():
        if name.startswith(RESULT_OF):
            metrics[f"agent/{name.removeprefix(RESULT_OF)}/mean"] = weighted(values, ~values.isnan())
    return metrics
