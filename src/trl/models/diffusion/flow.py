"""Rectified flows as policies: Stable Diffusion 3 and Flux, sampled by a stochastic differential equation."""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trl.models.diffusion.ddim import DDPOSchedulerOutput, drawn_step
from trl.models.diffusion.policy import Conditions, DiffusionPolicy, denoise, with_guidance
from trl.models.diffusion.trained import TrainedPipeline, import_diffusers
from trl.models.packed.layout import Inputs


class FlowPipeline(TrainedPipeline):
    """A `StableDiffusion3Pipeline` or `FluxPipeline` of diffusers; the transformer is trained."""

    part = "transformer"
    kinds = ("StableDiffusion3Pipeline", "FluxPipeline")


def flow_step(
    velocity: Tensor, latents: Tensor, sigmas: Tensor, next_sigmas: Tensor, *, noise_level: float, first_sigma: float,
    generators: list[torch.Generator] | None = None, next_latents: Tensor | None = None,
) -> DDPOSchedulerOutput:  # fmt: skip
    """One step of a rectified flow as a stochastic differential equation, or log-probability of `next_latents`.

    `velocity` and `latents` `(B, ...)`, `sigmas` and `next_sigmas` `(B,)`, from 1 (noise) to 0. `noise_level` 0 is the
    ordinary equation's Euler step. `first_sigma`, the second of the grid, stands for sigma where `1 - sigma` would be
    0. Computed in float32 or wider. Source: Liu et al. 2025, eq. 9 (arXiv:2505.05470).
    """
    dtype = torch.promote_types(latents.dtype, torch.float32)
    x, v = latents.to(dtype), velocity.to(dtype)
    now, after = (sigma.to(dtype).view(-1, *[1] * (x.ndim - 1)) for sigma in (sigmas, next_sigmas))
    step = after - now  # < 0
    spread = noise_level * (now / (1 - torch.where(now == 1, first_sigma, now))).sqrt()
    drift = spread.square() / (2 * now) * step
    mean = x * (1 + drift) + v * (step + drift * (1 - now))
    std = spread * (-step).sqrt()
    return drawn_step(mean, std, next_latents, generators, latents.dtype)


def _is_of_no_cut(record: logging.LogRecord) -> bool:
    """Whether to log a record: diffusers warns of every prompt that is cut, and the policy counts them."""
    return "truncated" not in record.getMessage()


class FlowPolicy(DiffusionPolicy):
    """A `FlowPipeline` as a policy. Guidance is an input of Flux, if it has one; Stable Diffusion 3 runs twice."""

    def __init__(self, pipeline: FlowPipeline, *, resolution: int | None = None, **settings: Any) -> None:
        inner = pipeline.sd_pipeline
        self._inner, self.is_flux = inner, isinstance(inner, import_diffusers().FluxPipeline)
        super().__init__(pipeline, is_guided=not self.is_flux, **settings)
        self.size = resolution or inner.default_sample_size * inner.vae_scale_factor
        patch = inner.vae_scale_factor * (2 if self.is_flux else self.model.config.patch_size)
        if self.size % patch:
            nearest = max(round(self.size / patch), 1) * patch
            raise ValueError(f"resolution must be a multiple of {patch}, got {self.size}. Set {nearest}.")
        grid: Inputs = {}
        if self.is_flux:
            grid["sigmas"] = np.linspace(1.0, 1 / self.num_steps, self.num_steps)
        scheduler = copy.deepcopy(inner.scheduler)
        config = scheduler.config
        if config.get("use_dynamic_shifting"):
            tokens = (self.size // patch) ** 2
            low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
            least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
            grid["mu"] = least + (most - least) * (tokens - low) / (high - low)
        scheduler.set_timesteps(self.num_steps, **grid)
        self.timesteps, self.sigmas = scheduler.timesteps, scheduler.sigmas
        logging.getLogger(inner.encode_prompt.__module__).addFilter(_is_of_no_cut)

    @property
    def frozen(self) -> list[nn.Module]:
        modules = self._inner.components.values()
        return [part for part in modules if isinstance(part, nn.Module) and part is not self.model]

    @property
    def model(self) -> Any:
        return self._inner.transformer

    @torch.no_grad()
    def embed(self, prompts: Sequence[str]) -> Conditions:
        """Hidden states and pooled states of the text encoders; a prompt is cut if none of them takes it whole."""
        inner, limit = self._inner, 512 if self.is_flux else 256
        clip = [(inner.tokenizer, inner.tokenizer.model_max_length)]
        t5 = inner.tokenizer_2 if self.is_flux else inner.tokenizer_3
        self._count_cut(prompts, [*clip, (t5, limit)] if t5 is not None else clip)
        options: Inputs = {"device": self.model.device, "max_sequence_length": limit}
        if self.is_flux:
            return inner.encode_prompt(list(prompts), None, **options)[:2]
        hidden, _, pooled, _ = inner.encode_prompt(
            list(prompts), None, None, do_classifier_free_guidance=False, **options
        )
        return hidden, pooled

    def _velocity(self, latents: Tensor, timesteps: Tensor, embeds: Conditions, model: Any) -> Tensor:
        hidden, pooled = embeds
        more: Inputs = {}
        if self.is_flux:
            rows, side, device = len(hidden), self.size // (2 * self._inner.vae_scale_factor), latents.device
            scale = torch.full((rows,), self.guidance_scale, device=device)
            more = {
                "guidance": scale if model.config.guidance_embeds else None,
                "txt_ids": hidden.new_zeros(hidden.shape[1], 3),
                "img_ids": self._inner._prepare_latent_image_ids(rows, side, side, device, hidden.dtype),
            }
            # diffusers rounds them for Flux, not for Stable Diffusion 3.
            timesteps = timesteps.to(latents.dtype) / 1000

        def forward(x: Tensor, times: Tensor) -> Tensor:
            inputs = {"hidden_states": x, "timestep": times, "encoder_hidden_states": hidden, **more}
            return model(**inputs, pooled_projections=pooled, return_dict=False)[0]

        guidance = self.guidance_scale if len(hidden) == 2 * len(latents) else None
        return with_guidance(forward, latents, timesteps, guidance)

    def _denoise(
        self, conditions: Conditions, generators: list[torch.Generator], first_trained: int | None
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        channels = self.model.config.in_channels // (4 if self.is_flux else 1)
        dtype, device = conditions[0].dtype, self.model.device
        x = self._inner.prepare_latents(len(generators), channels, self.size, self.size, dtype, device, generators)
        embeds = self.guided(conditions) if self.is_guided else conditions

        def predict(x: Tensor, timestep: Tensor) -> Tensor:
            return self._velocity(x, timestep.to(device).expand(len(x)), embeds, self.model)

        def step(velocity: Tensor, number: int, x: Tensor) -> DDPOSchedulerOutput:
            return self._step(velocity, x, torch.tensor([number]), generators=generators)

        latents, log_probs = denoise(
            x[0] if self.is_flux else x, self.timesteps, predict, step, first_trained=first_trained or 0
        )
        return self.decode(latents[-1]), latents, log_probs

    def _step(self, velocity: Tensor, latents: Tensor, numbers: Tensor, **options: Any) -> DDPOSchedulerOutput:
        sigmas, first = self.sigmas.to(latents.device), float(self.sigmas[1])
        now, after = sigmas[numbers], sigmas[numbers + 1]
        return flow_step(velocity, latents, now, after, noise_level=self.noise, first_sigma=first, **options)

    def step(
        self, latents: Tensor, timesteps: Tensor, next_latents: Tensor, embeds: Conditions,
        model: nn.Module | None = None,
    ) -> DDPOSchedulerOutput:  # fmt: skip
        velocity = self._velocity(latents, timesteps, embeds, self.model if model is None else model)
        numbers = (timesteps[:, None] - self.timesteps.to(timesteps)).abs().argmin(dim=1)
        return self._step(velocity, latents, numbers, next_latents=next_latents)

    def decode(self, latents: Tensor) -> Tensor:
        vae = self._inner.vae
        if self.is_flux:
            latents = self._inner._unpack_latents(latents, self.size, self.size, self._inner.vae_scale_factor)
        inputs = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        images = vae.decode(inputs, return_dict=False)[0]
        return self._inner.image_processor.postprocess(images, output_type="pt")

    def random_steps(self) -> Tensor:
        """All steps, bool `(S,)`. Raises ValueError for a noise level of 0, and for a single step."""
        if not self.noise > 0 or self.num_steps < 2:
            raise ValueError(
                f"noise_level must be > 0 and sample_num_steps >= 2, got {self.noise} and {self.num_steps}: without "
                "noise a step has no log-probability."
            )
        return torch.ones(self.num_steps, dtype=torch.bool)
