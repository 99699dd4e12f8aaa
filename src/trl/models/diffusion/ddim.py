"""DDIM steps with log-probabilities: sample the next latent, or score a given one under the present weights."""

from __future__ import annotations  # field types are recorded as they are written

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl.objectives.diffusion import gaussian_log_prob
from trl.options.checks import lookup
from trl.tensors.statistics import randn_tensor

Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass
class DDPOSchedulerOutput:
    """A denoising step: the next latents `(B, C, h, w)`, their log-probabilities `(B,)`, and their Gaussian.

    `mean` has the shape of the latents and `std` broadcasts against it; pipelines of older programs leave both out.
    """

    latents: Tensor
    log_probs: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None


# (clean latent, noise) of (output, latent, sqrt(alpha), sqrt(1 - alpha)), by diffusers' `prediction_type`.
PREDICTIONS = {
    "epsilon": lambda output, x, a, b: ((x - b * output) / a, output),
    "sample": lambda output, x, a, b: (output, (x - a * output) / b),
    "v_prediction": lambda output, x, a, b: (a * x - b * output, a * output + b * x),
}


def next_timesteps(scheduler: Any, timesteps: Tensor) -> Tensor:
    """The timestep that follows each, at least 0."""
    stride = scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    return (timesteps - stride).clamp(0, scheduler.config.num_train_timesteps - 1)


def deviations(scheduler: Any, timesteps: Tensor, eta: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The deviation of a step's noise for each timestep, of their shape; 0 where the step is deterministic.

    Source: Song et al. 2020, eq. 16 (arXiv:2010.02502).
    """
    alphas = scheduler.alphas_cumprod.to(timesteps.device, dtype)
    now, after = alphas[timesteps], alphas[next_timesteps(scheduler, timesteps)]
    return eta * ((1 - after) / (1 - now) * (1 - now / after)).clamp(min=0).sqrt()


def scheduler_step(
    scheduler: Any, model_output: Tensor, timestep: int | Tensor, sample: Tensor, eta: float = 0.0,
    use_clipped_model_output: bool = False, generator: Generators = None, prev_sample: Tensor | None = None,
) -> DDPOSchedulerOutput:  # fmt: skip
    """One DDIM step from `sample (B, C, h, w)`, with log-probability; with `prev_sample` only that one's.

    `timestep` is one for all rows or `(B,)`, `eta` the share of DDPM's noise. A list of generators has one for each
    row. Computed in float32 or wider; the latents have the dtype of `sample`, and the log-probability is that of the
    rounded latents. Raises: ValueError for a scheduler without `set_timesteps`, for `generator` together with
    `prev_sample`, and for an unknown prediction type.
    """
    if scheduler.num_inference_steps is None:
        raise ValueError("the scheduler has no timesteps. Call scheduler.set_timesteps(steps) first.")
    if generator is not None and prev_sample is not None:
        raise ValueError("generator and prev_sample cannot be combined: a given step draws no noise. Pass one.")
    config = scheduler.config
    predict = lookup(PREDICTIONS, config.prediction_type, "prediction_type")
    dtype = torch.promote_types(sample.dtype, torch.float32)
    x, output = sample.to(dtype), model_output.to(dtype)
    times = torch.as_tensor(timestep, device=sample.device).long().expand(len(sample))
    alphas = scheduler.alphas_cumprod.to(sample.device, dtype)
    now, after = (_as_column(alphas[t], x) for t in (times, next_timesteps(scheduler, times)))
    std = _as_column(deviations(scheduler, times, eta, dtype), x)

    clean, noise = predict(output, x, now.sqrt(), (1 - now).sqrt())
    if config.thresholding:
        clean = scheduler._threshold_sample(clean)
    elif config.clip_sample:
        clean = clean.clamp(-config.clip_sample_range, config.clip_sample_range)
    if use_clipped_model_output:
        noise = (x - now.sqrt() * clean) / (1 - now).sqrt()
    mean = after.sqrt() * clean + (1 - after - std.square()).clamp(min=0).sqrt() * noise

    return drawn_step(mean, std, prev_sample, generator, sample.dtype)


def drawn_step(
    mean: Tensor, std: Tensor, latents: Tensor | None, generator: Generators, dtype: torch.dtype
) -> DDPOSchedulerOutput:
    """A step to `latents`, drawn in `dtype` where they are None; the log-probability is that of the rounded ones."""
    if latents is None:
        noise = randn_tensor(tuple(mean.shape), generator, device=mean.device, dtype=mean.dtype)  # type: ignore[arg-type]
        latents = (mean + std * noise).to(dtype)
    return DDPOSchedulerOutput(latents, gaussian_log_prob(latents.to(mean.dtype), mean, std), mean, std)


def _as_column(values: Tensor, like: Tensor) -> Tensor:
    """`(B,) -> (B, 1, ...)`, with as many dimensions as `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))
