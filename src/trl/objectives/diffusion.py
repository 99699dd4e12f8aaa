"""Objectives of diffusion models: a denoising step is a Gaussian action, and its log-probability is what rewards train.

Log-probabilities and divergences of a step are means over the latent's elements (the scale of clip range and `beta`).
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def gaussian_log_prob(sample: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of `sample` under `N(mean, std^2)`, the mean over all elements of a row: `(B, ...) -> (B,)`.

    `sample` is not differentiated; `std` broadcasts against it. 0, without gradient, for rows whose `std` is 0: such a
    step is deterministic and has no density. Source: Black et al. 2023, section 4.3 (arXiv:2305.13301).

    >>> gaussian_log_prob(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0]]))
    tensor([-1.8621])
    """
    spread = std.expand_as(mean)
    random = spread > 0
    spread = torch.where(random, spread, 1.0)
    errors = torch.where(random, sample.detach() - mean, 0.0)
    values = -(errors / spread).square() / 2 - spread.log() - math.log(2 * math.pi) / 2
    return torch.where(random, values, 0.0).flatten(1).mean(dim=1)


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """KL divergence of Gaussians with one deviation, `(mean - ref_mean)^2 / (2 std^2)`, a mean of elements, `(B,)`.

    0 for rows whose `std` is 0. Source: Liu et al. 2025, section 3.2 (arXiv:2505.05470).

    >>> gaussian_kl(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0]]))
    tensor([0.2500])
    """
    spread = std.expand_as(mean)
    random = spread > 0
    scaled = torch.where(random, mean - ref_mean, 0.0) / torch.where(random, spread, 1.0)
    return (scaled.square() / 2).flatten(1).mean(dim=1)


class PerPromptStatTracker:
    """Advantages of rewards against the remembered rewards of their own prompt.

    `buffer_size` rewards are remembered for each prompt; a prompt with fewer than `min_count` takes the mean and
    deviation of the whole batch instead. Source: Black et al. 2023, section 4.3 (arXiv:2305.13301).

    >>> tracker = PerPromptStatTracker(buffer_size=8, min_count=2)
    >>> tracker.update(["a", "a", "b"], [1.0, 3.0, 2.0]).round(3).tolist()
    [-1.0, 1.0, 0.0]
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        self.buffer_size, self.min_count = buffer_size, min_count
        self.stats: dict[str, deque[float]] = {}

    def update(self, prompts: Sequence[str], rewards: npt.ArrayLike) -> np.ndarray:
        """Remember the rewards `(N,)` of N prompts; returns their advantages `(N,)`."""
        names, values = np.asarray(prompts), np.asarray(rewards, dtype=np.float64)
        advantages = np.empty_like(values)
        for prompt in dict.fromkeys(names.tolist()):
            prompt_rewards = values[names == prompt]
            known = self.stats.setdefault(prompt, deque(maxlen=self.buffer_size))
            known.extend(prompt_rewards.tolist())
            against = values if len(known) < self.min_count else np.asarray(known)
            advantages[names == prompt] = (prompt_rewards - against.mean()) / (against.std() + 1e-6)
        return advantages

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Mean, deviation and number of the remembered rewards of each prompt."""
        moments = {prompt: (float(np.mean(rewards)), float(np.std(rewards))) for prompt, rewards in self.stats.items()}
        return {p: {"mean": mean, "std": std, "count": len(self.stats[p])} for p, (mean, std) in moments.items()}
