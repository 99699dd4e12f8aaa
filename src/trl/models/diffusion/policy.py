"""Diffusion models as policies: sample trajectories with log-probabilities, score their steps again, decode."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trl.models.diffusion.ddim import DDPOSchedulerOutput
from trl.models.switches import seed_of

logger = logging.getLogger(__name__)

Conditions = tuple[Tensor, ...]
"""What the model is told of B prompts: tensors with B rows."""


class Trajectory(NamedTuple):
    """B images, and S denoising steps of each."""

    images: Tensor  # (B, 3, H, W), in 0..1
    latents: Tensor  # (B, S + 1, ...), from noise to image
    timesteps: Tensor  # (B, S), the scheduler's
    log_probs: Tensor  # (B, S)


class DiffusionPolicy(ABC):
    """The seam between trainers and kinds of diffusion models.

    `pipeline` has `get_trainable_layers`, `save_checkpoint`, `load_checkpoint`, `save_pretrained` and `autocast`.
    `noise` is the `sample_eta` of DDIM or the `noise_level` of a flow. Hooks may replace the pipeline's scheduler.
    """

    timesteps: Tensor
    """Those of the S steps, `(S,)`."""

    def __init__(
        self, pipeline: Any, *, num_steps: int, noise: float, guidance_scale: float,
        trains_guidance: bool = True, negative_prompt: str | None = None, is_guided: bool = True,
    ) -> None:  # fmt: skip
        self.pipeline = pipeline
        self.num_steps, self.noise, self.guidance_scale = num_steps, noise, guidance_scale
        self.is_guided = is_guided and guidance_scale > 1
        self.trains_guidance = self.is_guided and trains_guidance
        self.negative_prompt, self.cut_prompts = negative_prompt or "", 0

    @property
    @abstractmethod
    def frozen(self) -> list[nn.Module]:
        """The modules that are never trained."""

    @property
    @abstractmethod
    def model(self) -> Any:
        """The denoising model."""

    @abstractmethod
    def embed(self, prompts: Sequence[str]) -> Conditions:
        """The conditions of prompts; those that are too long for the text encoder are cut and counted."""

    @cached_property
    def negative(self) -> Conditions:
        """The conditions of the negative prompt, with one row."""
        return self.embed([self.negative_prompt])

    def _count_cut(self, prompts: Sequence[str], tokenizers: Sequence[tuple[Any, int]]) -> None:
        """Add the prompts that are longer than the limit of each tokenizer to `cut_prompts`; warns of the first."""
        fits = [
            [len(ids) <= limit for ids in tokenizer(list(prompts), verbose=False).input_ids]
            for tokenizer, limit in tokenizers
        ]
        cut = sum(not any(fit) for fit in zip(*fits, strict=True))
        if cut and not self.cut_prompts:
            logger.warning(
                "%d of %d prompts are longer than the text encoder's %d tokens and are cut. Logged once; counted as "
                "cut_prompts.",
                cut, len(prompts), max(limit for _, limit in tokenizers),
            )  # fmt: skip
        self.cut_prompts += cut

    def guided(self, conditions: Conditions) -> Conditions:
        """With `2 B` rows, those of the negative prompt first."""
        pairs = zip(self.negative, conditions, strict=True)
        return tuple(torch.cat([negative.expand_as(positive), positive]) for negative, positive in pairs)

    def training_embeds(self, conditions: Conditions) -> Any:
        """The conditions as `step` takes them: with the negative prompt's in front where guidance is trained."""
        return self.guided(conditions) if self.trains_guidance else conditions

    def begin_training(self) -> None:
        """Before the steps of an epoch are scored again."""
        self.model.train()

    def sample(
        self, conditions: Conditions, generators: list[torch.Generator], first_trained: int | None = None
    ) -> Trajectory:
        """Denoise; each generator draws all noise of its row.

        Images have a gradient to the model's outputs at step `first_trained` and later, or none. With guidance that is
        not trained, log-probabilities are those without guidance, which are trained.
        """
        with torch.set_grad_enabled(first_trained is not None):
            images, latents, log_probs = self._denoise(conditions, generators, first_trained)
            latents = torch.stack(list(latents), dim=1)
            timesteps = self.timesteps.to(latents.device).expand(len(latents), -1)
            if self.is_guided and not self.trains_guidance and first_trained is None:
                steps = zip(latents.unbind(1), timesteps.unbind(1), latents[:, 1:].unbind(1), strict=False)
                log_probs = [self.step(*inputs, self.training_embeds(conditions)).log_probs for inputs in steps]
        return Trajectory(images, latents, timesteps, torch.stack(list(log_probs), dim=1))

    @abstractmethod
    def _denoise(
        self, conditions: Conditions, generators: list[torch.Generator], first_trained: int | None
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Images, S + 1 latents and S log-probabilities."""

    @abstractmethod
    def step(
        self, latents: Tensor, timesteps: Tensor, next_latents: Tensor, embeds: Any, model: nn.Module | None = None
    ) -> DDPOSchedulerOutput:
        """A step's log-probability `(B,)` under the present weights or another `model`'s; `timesteps (B,)`."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Images in 0..1."""

    @abstractmethod
    def random_steps(self) -> Tensor:
        """Of the S steps of a trajectory, those that draw noise: bool `(S,)`. Only they can be learned from.

        Raises: ValueError where none does.
        """


def denoise(
    x: Tensor, timesteps: Iterable[Tensor], predict: Callable[[Tensor, Tensor], Tensor],
    step: Callable[[Tensor, int, Tensor], DDPOSchedulerOutput], *, first_trained: int = 0, recomputes: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """The S + 1 latents and S log-probabilities of a trajectory that starts at `x`.

    `predict(x, timestep)` is the model's output and `step(output, number, x)` the scheduler's step. Where gradients are
    enabled, outputs of step `first_trained` (0: noisiest) and later have one; `recomputes` runs the model again.
    """
    latents, log_probs = [x], []
    for number, timestep in enumerate(timesteps):
        has_grad = torch.is_grad_enabled() and number >= first_trained
        with torch.set_grad_enabled(has_grad):
            again = has_grad and recomputes
            output = checkpoint(predict, x, timestep, use_reentrant=False) if again else predict(x, timestep)
        drawn = step(output, number, x)
        x = drawn.latents
        latents.append(x)
        log_probs.append(drawn.log_probs)
    return latents, log_probs


def with_guidance(
    forward: Callable[[Tensor, Tensor], Tensor], x: Tensor, times: Tensor, guidance: float | None, rescale: float = 0.0
) -> Tensor:  # fmt: skip
    """A model's output for latents `(B, ...)` at `times (B,)`; with `guidance` twice, without the prompt first.

    Source: Ho and Salimans 2022, eq. 6 (arXiv:2207.12598), weight `guidance - 1`; `rescale`: arXiv:2305.08891, eq. 16.
    """
    if guidance is None:
        return forward(x, times)
    without, within = forward(torch.cat([x] * 2), torch.cat([times] * 2)).chunk(2)
    output = without + guidance * (within - without)
    if rescale:
        axes = tuple(range(1, output.ndim))
        same = output * within.std(axes, keepdim=True) / output.std(axes, keepdim=True)
        output = rescale * same + (1 - rescale) * output
    return output


def draw_step(bounds: Sequence[int], last: int, generator: torch.Generator | None = None) -> int:
    """A denoising step, drawn uniformly between two bounds (both included), those after the `last` left out."""
    lowest, highest = bounds
    return int(torch.randint(lowest, max(min(highest, last), lowest) + 1, (1,), generator=generator))


def generator_of(*numbers: int) -> torch.Generator:
    """A random generator on the CPU for a seed and the numbers of what it draws, such as epoch and image.

    >>> bool(torch.randn(1, generator=generator_of(0, 1)) == torch.randn(1, generator=generator_of(0, 1)))
    True
    """
    return torch.Generator().manual_seed(seed_of(*numbers))
