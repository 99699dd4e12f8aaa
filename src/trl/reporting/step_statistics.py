"""Statistics of a step of PPO by their documented names, and dicts of tensors in the form that trackers take."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl.objectives.advantages import TokenRewards, rollout_metrics
from trl.objectives.ppo import explained_variance
from trl.reporting.metrics import MetricSums
from trl.tensors.moments import moments
from trl.tensors.reduce import where_counted

Value = TypeVar("Value")
Statistics = Mapping[str, Tensor]
_LISTS = ("policy/advantages", "policy/ratio")
WANDB_PADDING = -1  # stands in histograms where a minibatch had fewer values than another


def stack_dicts(stats_dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each name's tensors, flattened, as the rows of one, filled up with `WANDB_PADDING`.

    >>> stack_dicts([{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor(3.0)}])
    {'x': tensor([[ 1.,  2.],
            [ 3., -1.]])}
    """
    names = stats_dicts[0] if stats_dicts else ()
    rows = {name: [stats[name].flatten() for stats in stats_dicts] for name in names}
    return {name: pad_sequence(values, batch_first=True, padding_value=WANDB_PADDING) for name, values in rows.items()}


def add_suffix(input_dict: Mapping[str, Value], suffix: str) -> dict[str, Value]:
    """The dict with `suffix` behind each key.

    >>> add_suffix({"loss": 1}, "/mean")
    {'loss/mean': 1}
    """
    return {f"{name}{suffix}": value for name, value in input_dict.items()}


def average_torch_dicts(list_of_dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each name's mean over dicts of tensors, elementwise.

    >>> average_torch_dicts([{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0, 2.0])}])
    {'x': tensor([2., 2.])}
    """
    names = list_of_dicts[0] if list_of_dicts else ()
    return {name: torch.stack([statistics[name] for statistics in list_of_dicts]).mean(dim=0) for name in names}


def convert_to_scalar(stats: Mapping[str, object]) -> dict[str, object]:
    """Tensors and arrays of one element as plain numbers; everything else stays.

    >>> convert_to_scalar({"loss": torch.tensor(0.5), "lengths": torch.zeros(2)})
    {'loss': 0.5, 'lengths': tensor([0., 0.])}
    """
    plain = stats_to_np(stats)
    return {name: old if isinstance(plain[name], np.ndarray) else plain[name] for name, old in stats.items()}


def stats_to_np(stats_dict: Mapping[str, object]) -> dict[str, object]:
    """Tensors as numpy arrays, of one element as plain numbers; 16-bit floats become float32; other values stay.

    >>> stats_to_np({"loss": torch.tensor(0.5), "kept": "text"})
    {'loss': 0.5, 'kept': 'text'}
    """
    return {name: _plain(value) for name, value in stats_dict.items()}


def _plain(value: Any) -> object:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        if value.dtype == np.float16:
            value = value.astype(np.float32)
    scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1)
    return value.item() if scalar else value


class MinibatchRecord:
    """Statistics of a step's minibatches: means over its optimiser steps of those over all tokens of all processes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._steps: list[list[tuple[int, Statistics]]] = []

    def begin(self) -> None:
        """Begin an optimiser step."""
        self._steps.append([])

    def add(self, tokens: int, statistics: Statistics) -> None:
        """Add a minibatch to the current optimiser step."""
        self._steps[-1].append((tokens, statistics))

    def last(self, name: str) -> float:
        """One mean of the latest optimiser step."""
        total, count = self._summed([[n * float(statistics[name]), float(n)] for n, statistics in self._steps[-1]])
        return float(total / count)

    def summary(self) -> dict[str, Tensor]:
        """The step's values by name; lists are this process's, one after another."""
        every = [statistics for step in self._steps for _, statistics in step]
        present = [name for name in _LISTS if name in every[0]]
        lists = {name: torch.cat([statistics[name].flatten() for statistics in every]) for name in present}
        names = [name for name in every[0] if name not in lists]
        table = torch.stack([self._summed([_sums(names, *part) for part in step]) for step in self._steps])
        counts = table[:, 0]
        means = dict(zip(names, (table[:, 1:] / counts[:, None]).T, strict=True))
        for name in (name for name in names if name.endswith("/var")):
            square = means[_mean_of(name)].square()
            means[name] = (means[name] - square) * counts / (counts - 1)
        return {**{name: value.mean() for name, value in means.items()}, **lists}

    def _summed(self, parts: list[list[float]]) -> Tensor:
        sums = torch.tensor(parts, dtype=torch.float64).sum(dim=0)
        if self._accelerator.num_processes == 1:
            return sums
        every: Any = self._accelerator.reduce(sums.to(self._accelerator.device), reduction="sum")
        return every.cpu()


def _mean_of(variance: str) -> str:
    return f"{variance.removesuffix('/var')}/mean"


def _sums(names: Sequence[str], tokens: int, statistics: Statistics) -> list[float]:
    """A minibatch's number of tokens and sums over them; for a variance, the sum of squares."""
    means = {name: float(statistics[name]) for name in names}
    for name in names:
        if name.endswith("/var"):
            deviations = means[name] * (tokens - 1) if tokens > 1 else 0.0
            means[name] = deviations / tokens + means[_mean_of(name)] ** 2
    return [float(tokens), *(tokens * mean for mean in means.values())]


def step_statistics(
    *, kl_coef: float, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, non_score_reward: Tensor, kls: Tensor,
    masks: Tensor, queries: Sequence[Tensor], responses: Sequence[Tensor], train_stats: Statistics,
    accelerator: Accelerator,
) -> dict[str, Any]:  # fmt: skip
    """All documented statistics of a step but its times; `scores (B,)`, other tensors `(B, R)` of this process."""
    counted, sums = masks != 0, MetricSums()
    sums.add(rollout_metrics(TokenRewards(non_score_reward, non_score_reward), kls, logprobs, scores, masks))
    columns = {
        "kl": where_counted(kls, counted).sum(dim=1),
        "scores": scores,
        "queries": scores.new_tensor([len(query) for query in queries]),
        "responses": scores.new_tensor([len(response) for response in responses]),
    }
    table: Any = accelerator.gather(torch.stack([column.double() for column in columns.values()], dim=1))
    of = dict(zip(columns, table.T, strict=True))
    statistics: dict[str, Any] = {
        **sums.drain(accelerator),
        "objective/kl_dist": of["kl"],
        "objective/kl_coef": kl_coef,
        "objective/logprobs": logprobs[counted],
        "objective/ref_logprobs": ref_logprobs[counted],
        "ppo/std_scores": moments(of["scores"]).variance.sqrt(),
    }
    for name in ("queries", "responses"):
        statistics[f"tokens/{name}_len_mean"] = of[name].mean()
        statistics[f"tokens/{name}_len_std"] = moments(of[name]).variance.sqrt()
        statistics[f"tokens/{name}_dist"] = of[name]
    statistics |= {f"ppo/{name}": value for name, value in train_stats.items()}
    if "ppo/val/error" in statistics:
        error, variance = float(statistics["ppo/val/error"]), float(statistics["ppo/returns/var"])
        statistics["ppo/val/var_explained"] = explained_variance(error, variance)
    return statistics


def tracker_logs(
    stats: Mapping[str, object], scores: Tensor, rewards: Sequence[float], columns: Mapping[str, Any], *, kind: str
) -> dict[str, object]:
    """A step's statistics and those of all `scores`, as a tracker takes them: wandb with a table of `columns`."""
    scores = scores.cpu()
    logs = {
        **stats,
        "env/reward_mean": float(scores.mean()),
        "env/reward_std": float(scores.std()) if len(scores) > 1 else 0.0,
        "env/reward_dist": scores.numpy(),
    }
    if kind != "wandb":
        return {name: value for name, value in logs.items() if not isinstance(value, np.ndarray)}
    import wandb  # pyright: ignore[reportMissingImports]

    rows = [list(row) for row in zip(*columns.values(), rewards, strict=True)]
    return logs | {"game_log": wandb.Table(columns=[*columns, "reward"], rows=rows)}
