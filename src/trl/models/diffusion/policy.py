"""Diffusion models as policies: sample trajectories with log-probabilities, score their steps again, decode."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trl.models.diffusion.ddim import DDPOSchedulerOutput, deviations
from trl.models.diffusion.stable_diffusion import (
    DDPOStableDiffusionPipeline,
    DefaultDDPOStableDiffusionPipeline,
    decode_latents,
    predict_noise,
)

logger = logging.getLogger(__name__)

Conditions = tuple[Tensor, ...]
"""What the model is told of B prompts: tensors with B rows."""


class Trajectory(NamedTuple):
    """B images in 0..1 `(B, 3, H, W)`, the latents from noise to image `(B, S + 1, ...)`, and for each of the S steps the
    scheduler's timestep `(B, S)` and the log-probability `(B, S)`."""

    images: Tensor
    latents: Tensor
    timesteps: Tensor
    log_probs: Tensor


class DiffusionPolicy(Protocol):
    """The seam between trainers and kinds of diffusion models."""

    pipeline: Any
    """Has `get_trainable_layers`, `save_checkpoint`, `load_checkpoint`, `save_pretrained` and `autocast`."""

    @property
    def frozen(self) -> list[Any]:
        """The modules that are never trained."""
        ...

    @property
    def model(self) -> Any:
        """The denoising model."""
        ...

    def embed(self, prompts: Sequence[str]) -> Conditions:
        """The conditions of prompts; those that are too long for the text encoder are cut and counted."""
        ...

    def sample(self, conditions: Conditions, generators: list[torch.Generator]) -> Trajectory:
        """Denoise without gradient; each generator draws all noise of its row."""
        ...

    def set_timesteps(self) -> Any:
        """Give the scheduler, which others may have used, the timesteps of a trajectory."""
        ...

    def training_embeds(self, conditions: Conditions) -> Any:
        """The conditions as `step` takes them: with the negative prompt's in front where guidance is trained."""
        ...

    def step(
        self, latents: Tensor, timesteps: Tensor, next_latents: Tensor, embeds: Any, model: Any = None
    ) -> DDPOSchedulerOutput:
        """A step's log-probability `(B,)` under the present weights (or another `model`'s), with gradient; `timesteps (B,)`."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images in 0..1."""
        ...

    def random_steps(self) -> Tensor:
        """Of the S steps of a trajectory, those that draw noise: bool `(S,)`. Only they can be learned from.

        Raises: ValueError where none does.
        """
        ...


class DDIMPolicy:
    """A `DDPOStableDiffusionPipeline` as a policy; its scheduler must be DDIM unless it defines a `scheduler_step` of its own."""

    def __init__(
        self,
        pipeline: DDPOStableDiffusionPipeline,
        *,
        num_steps: int,
        eta: float = 1.0,
        guidance_scale: float = 5.0,
        trains_guidance: bool = True,
        negative_prompt: str | None = "",
    ) -> None:
        if not isinstance(pipeline, DDPOStableDiffusionPipeline):
            raise TypeError(
                f"sd_pipeline must be a DDPOStableDiffusionPipeline, got {type(pipeline).__name__}. Wrap it: "
                "DefaultDDPOStableDiffusionPipeline(pipeline)."
            )
        self.pipeline, self.num_steps, self.eta, self.guidance_scale = (
            pipeline,
            num_steps,
            eta,
            guidance_scale,
        )
        self.is_guided = guidance_scale > 1
        self.trains_guidance = self.is_guided and trains_guidance
        self.negative_prompt, self.cut_prompts = negative_prompt or "", 0
        self._negative: Conditions | None = None

    @property
    def frozen(self) -> list[Any]:
        """Decoder and text encoder."""
        return [self.pipeline.vae, self.pipeline.text_encoder]

    @property
    def model(self) -> Any:
        """The UNet."""
        return self.pipeline.unet

    @torch.no_grad()
    def embed(self, prompts: Sequence[str]) -> Conditions:
        """Hidden states of the text encoder, `(B, T, D)`."""
        tokenizer, encoder = self.pipeline.tokenizer, self.pipeline.text_encoder
        limit = tokenizer.model_max_length
        count_cut(self, prompts, [(tokenizer, limit)])
        ids = tokenizer(
            list(prompts), padding="max_length", max_length=limit, truncation=True, return_tensors="pt"
        )
        return (encoder(ids.input_ids.to(next(encoder.parameters()).device))[0],)

    @property
    def negative(self) -> Tensor:
        """The negative prompt's hidden states, `(1, T, D)`."""
        if self._negative is None:
            self._negative = self.embed([self.negative_prompt])
        return self._negative[0]

    def sampling(self, conditions: Conditions, generators: list[torch.Generator] | None) -> dict[str, Any]:
        """The arguments of a call of the pipeline."""
        (embeds,) = conditions
        return {
            "prompt_embeds": embeds,
            "negative_prompt_embeds": self.negative.expand_as(embeds),
            "num_inference_steps": self.num_steps,
            "guidance_scale": self.guidance_scale,
            "eta": self.eta,
            "generator": generators,
            "output_type": "pt",
        }

    @torch.no_grad()
    def sample(self, conditions: Conditions, generators: list[torch.Generator]) -> Trajectory:
        """Denoise; with guidance that is not trained, log-probabilities are those without guidance, which are trained."""
        found = self.pipeline(**self.sampling(conditions, generators))
        latents = torch.stack(list(found.latents), dim=1)
        timesteps = self.pipeline.scheduler.timesteps.to(latents.device).expand(len(latents), -1)
        log_probs = torch.stack(list(found.log_probs), dim=1)
        if self.is_guided and not self.trains_guidance:
            embeds = self.training_embeds(conditions)
            scored = [
                self.step(latents[:, n], timesteps[:, n], latents[:, n + 1], embeds).log_probs
                for n in range(timesteps.shape[1])
            ]
            log_probs = torch.stack(scored, dim=1)
        return Trajectory(found.images, latents, timesteps, log_probs)

    def set_timesteps(self) -> None:
        """Of a trajectory."""
        self.pipeline.scheduler.set_timesteps(self.num_steps)

    def training_embeds(self, conditions: Conditions) -> Tensor:
        """`(2 B, T, D)`, negative ones first, or `(B, T, D)` without guidance."""
        (embeds,) = conditions
        return torch.cat([self.negative.expand_as(embeds), embeds]) if self.trains_guidance else embeds

    def step(
        self, latents: Tensor, timesteps: Tensor, next_latents: Tensor, embeds: Any, model: Any = None
    ) -> DDPOSchedulerOutput:
        """A DDIM step's log-probability."""
        guidance = self.guidance_scale if len(embeds) == 2 * len(latents) else None
        output = predict_noise(self.model if model is None else model, latents, timesteps, embeds, guidance)
        return self.pipeline.scheduler_step(
            output, timesteps, latents, eta=self.eta, prev_sample=next_latents
        )

    def decode(self, latents: Tensor) -> Tensor:
        """Images in 0..1."""
        return decode_latents(getattr(self.pipeline, "sd_pipeline", self.pipeline), latents, "pt")

    def random_steps(self) -> Tensor:
        """The steps with noise, bool `(S,)`. Raises ValueError for eta 0 and for another scheduler than DDIM."""
        scheduler, kind = self.pipeline.scheduler, type(self.pipeline.scheduler).__name__
        if not self.eta > 0:
            raise ValueError(
                f"sample_eta must be > 0, got {self.eta}: without noise a step has no log-probability."
            )
        steps_itself = (
            type(self.pipeline).scheduler_step is not DefaultDDPOStableDiffusionPipeline.scheduler_step
        )
        if kind != "DDIMScheduler" and not steps_itself:
            raise ValueError(
                f"the scheduler must be a DDIMScheduler, whose steps have a log-probability, got {kind}. Set "
                "scheduler = DDIMScheduler.from_config(scheduler.config)."
            )
        self.set_timesteps()
        if kind != "DDIMScheduler":
            return torch.ones(len(scheduler.timesteps), dtype=torch.bool)
        return deviations(scheduler, scheduler.timesteps, self.eta) > 0


def count_cut(policy: Any, prompts: Sequence[str], tokenizers: Sequence[tuple[Any, int]]) -> None:
    """Add the prompts that are longer than the limit of each tokenizer to `policy.cut_prompts`; warns of the first."""
    fits = [
        [len(ids) <= limit for ids in tokenizer(list(prompts), verbose=False).input_ids]
        for tokenizer, limit in tokenizers
    ]
    cut = sum(not any(each) for each in zip(*fits, strict=True))
    if cut and not policy.cut_prompts:
        logger.warning(
            "%d of %d prompts are longer than the text encoder's %d tokens and are cut. Logged once; counted as cut_prompts.",
            cut, len(prompts), max(limit for _, limit in tokenizers),
        )  # fmt: skip
    policy.cut_prompts += cut


def generator_of(*numbers: int) -> torch.Generator:
    """A random generator on the CPU for a seed and the numbers of what it draws, such as epoch and image.

    >>> bool(torch.randn(1, generator=generator_of(0, 1)) == torch.randn(1, generator=generator_of(0, 1)))
    True
    """
    state = np.random.SeedSequence([abs(number) for number in numbers]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)
