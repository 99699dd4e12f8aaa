"""Mean and variance of values that come in parts: over masked batches, over processes, over the steps of a run.

Parts are merged by their counts, means and sums of squared deviations (Chan et al. 1979), so that any split of the same
values gives the same moments, and large means lose no digits.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl.tensors.reduce import where_counted

_FLOOR = 1e-8  # added to a variance before values are divided by its root


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations from that mean, 0-dim each."""

    count: Tensor
    mean: Tensor
    deviations: Tensor

    @property
    def variance(self) -> Tensor:
        """The unbiased variance, over `count - 1`; NaN for fewer than two values."""
        return self.deviations / torch.where(self.count > 1, self.count - 1, math.nan)

    def plus(self, other: "Moments") -> "Moments":
        """Both together.

        >>> moments(torch.tensor([1.0, 3.0])).plus(moments(torch.tensor([8.0]))).mean
        tensor(4., dtype=torch.float64)
        """
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        gap = other.mean - self.mean
        within = self.deviations + other.deviations
        return Moments(count, self.mean + gap * share, within + gap.square() * self.count * share)


def moments(values: Tensor, mask: Tensor | None = None) -> Moments:
    """Moments of the values whose mask (same shape; None: all) is not 0, in float64 where the device has it; detached.

    >>> moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0])).variance
    tensor(2., dtype=torch.float64)
    """
    wide = values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)
    kept = torch.ones_like(wide) if mask is None else (mask != 0).expand_as(wide).to(wide.dtype)
    count = kept.sum()
    mean = where_counted(wide, kept).sum() / count.clamp(min=1)
    return Moments(count, mean, where_counted((wide - mean).square(), kept).sum())


def over_processes(part: Moments, accelerator: Any) -> Moments:
    """The moments of what all processes hold, given each one's own; the order of merging is the ranks'."""
    if accelerator.num_processes == 1:
        return part
    every = accelerator.gather(torch.stack(list(part))[None].to(accelerator.device)).to(part.mean.device)
    whole = Moments(*every[0])
    for row in every[1:]:
        whole = whole.plus(Moments(*row))
    return whole


def whiten_by(values: Tensor, measured: Moments, *, shift_mean: bool = True) -> Tensor:
    """`masked_whiten` by moments that were measured elsewhere; any shape. Raises: ValueError for fewer than two values.

    >>> whiten_by(torch.tensor([1.0, 3.0]), moments(torch.tensor([1.0, 3.0])))
    tensor([-0.7071,  0.7071])
    """
    if int(measured.count) < 2:
        raise ValueError(f"whitening needs at least 2 values, got {int(measured.count)}. Use a larger batch.")
    mean, variance = measured.mean.to(values.dtype), measured.variance.to(values.dtype)
    whitened = (values - mean) * torch.rsqrt(variance + _FLOOR)
    return whitened if shift_mean else whitened + mean


@dataclass
class RunningMoments:
    """Mean and standard deviation (unbiased) of everything that `update` has seen on all processes.

    `accelerator` gathers; `var` is the biased variance, as in the saved files of older programs.
    """

    accelerator: Any
    mean: float = 0
    std: float = 1
    var: float = 1
    count: float = 1e-24

    @torch.no_grad()
    def update(self, xs: Tensor) -> tuple[float, float]:
        """Take in a batch from every process; returns the mean and the standard deviation of this batch alone.

        Raises ValueError for values that are not finite: they would stay in the running moments for good.
        """
        batch = over_processes(moments(xs), self.accelerator)
        if not math.isfinite(float(batch.mean)):
            raise ValueError(f"running moments must be finite, got a mean of {float(batch.mean)}.")
        # The count of nothing is 1e-24, so that older files and programs can divide by it.
        before = [self.count, self.mean, self.var * self.count] if self.count >= 1 else [0, 0, 0]
        whole = Moments(*batch.mean.new_tensor(before)).plus(batch)
        self.count, self.mean = float(whole.count), float(whole.mean)
        self.var = float(whole.deviations / whole.count)
        self.std = _deviation(whole, otherwise=self.std)
        return float(batch.mean), _deviation(batch, otherwise=math.nan)

    def save_to_json(self, json_path: str) -> None:
        """Write the four numbers to a file."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        Path(json_path).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load_from_json(cls, accelerator: Any, json_path: str) -> "RunningMoments":
        """Read what `save_to_json` wrote."""
        return cls(accelerator=accelerator, **json.loads(Path(json_path).read_text(encoding="utf-8")))


def get_global_statistics(
    accelerator: Any, xs: Tensor, mask: Tensor | None = None, device: str = "cpu"
) -> tuple[Tensor, Tensor, int]:
    """Mean, biased variance and count of the (masked) values of all processes, as tensors on `device`."""
    whole = over_processes(moments(xs, mask), accelerator)
    mean, variance = whole.mean, whole.deviations / whole.count.clamp(min=1)
    return mean.to(device), variance.to(device), int(whole.count)


def _deviation(measured: Moments, *, otherwise: float) -> float:
    return float(measured.variance.sqrt()) if measured.count > 1 else otherwise
