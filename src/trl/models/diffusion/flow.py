"""Rectified flows as policies: Stable Diffusion 3 and Flux, sampled by a stochastic differential equation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trl.models.diffusion.ddim import DDPOSchedulerOutput
from trl.models.diffusion.policy import Conditions, Trajectory, count_cut
from trl.models.diffusion.trained import TrainedPipeline, import_diffusers
from trl.objectives.diffusion import gaussian_log_prob
from trl.tensors.statistics import randn_tensor


class FlowPipeline(TrainedPipeline):
    """A `StableDiffusion3Pipeline` or `FluxPipeline` of diffusers, with an adapter (`use_lora`) or whole, to be trained.

    `pretrained_model_name` is a Hub name, a folder, or the pipeline. LoRA weights beside the model are loaded, and `use_lora` is then
    True.
    """

    part = "transformer"

    def __init__(
        self, pretrained_model_name: Any, *, pretrained_model_revision: str = "main", use_lora: bool = True
    ) -> None:
        given = pretrained_model_name
        if isinstance(given, (str, Path)):
            given = import_diffusers().DiffusionPipeline.from_pretrained(
                given, revision=pretrained_model_revision
            )
        if (
            not hasattr(getattr(given, "scheduler", None), "sigmas")
            or getattr(given, "transformer", None) is None
        ):
            raise TypeError(
                f"a flow model needs a transformer and a flow-matching scheduler, got {type(given).__name__}."
            )
        self.pretrained_model, self.pretrained_revision = pretrained_model_name, pretrained_model_revision
        self.sd_pipeline, self.use_lora = given, use_lora
        self._load_lora()
        for module in given.components.values():
            if isinstance(module, nn.Module):
                module.requires_grad_(module is given.transformer and not self.use_lora)


def flow_step(
    velocity: Tensor,
    latents: Tensor,
    sigmas: Tensor,
    next_sigmas: Tensor,
    *,
    noise_level: float,
    first_sigma: float,
    generators: list[torch.Generator] | None = None,
    next_latents: Tensor | None = None,
) -> DDPOSchedulerOutput:
    """One step of a rectified flow as a stochastic differential equation, or the log-probability of given `next_latents`.

    `velocity` and `latents` `(B, ...)`, `sigmas` and `next_sigmas` `(B,)`, from 1 (noise) to 0. `noise_level` 0 is the ordinary
    equation's Euler step. `first_sigma`, the second of the grid, stands for sigma where `1 - sigma` would be 0. Computed in
    float32 or wider. Source: Liu et al. 2025, eq. 9 (arXiv:2505.05470).
    """
    dtype = torch.promote_types(latents.dtype, torch.float32)
    x, v = latents.to(dtype), velocity.to(dtype)
    now, after = (each.to(dtype).view(-1, *[1] * (x.ndim - 1)) for each in (sigmas, next_sigmas))
    step = after - now  # < 0
    spread = noise_level * (now / (1 - torch.where(now == 1, first_sigma, now))).sqrt()
    drift = spread.square() / (2 * now) * step
    mean = x * (1 + drift) + v * (step + drift * (1 - now))
    std = spread * (-step).sqrt()
    following = next_latents
    if following is None:
        drawn = randn_tensor(tuple(x.shape), generators, device=x.device, dtype=dtype)
        following = (mean + std * drawn).to(latents.dtype)
    return DDPOSchedulerOutput(following, gaussian_log_prob(following.to(dtype), mean, std), mean, std)


class FlowPolicy:
    """A `FlowPipeline` as a policy. Flux takes `guidance_scale` as an input where it has one; Stable Diffusion 3 runs twice."""

    def __init__(
        self,
        pipeline: FlowPipeline,
        *,
        num_steps: int,
        noise_level: float = 0.7,
        guidance_scale: float = 4.5,
        trains_guidance: bool = True,
        negative_prompt: str | None = "",
        resolution: int | None = None,
    ) -> None:
        self.pipeline, self.num_steps, self.noise_level = pipeline, num_steps, noise_level
        self._inner: Any = pipeline.sd_pipeline
        self.is_flux = "Flux" in type(self._inner.transformer).__name__
        self.guidance_scale, self.negative_prompt = guidance_scale, negative_prompt or ""
        self.is_guided = guidance_scale > 1 and not self.is_flux
        self.trains_guidance = self.is_guided and trains_guidance
        self.size = resolution or self._inner.default_sample_size * self._inner.vae_scale_factor
        self._negative: Conditions | None = None
        self.cut_prompts = 0

    @property
    def frozen(self) -> list[Any]:
        """All modules but the transformer."""
        modules = self._inner.components.values()
        return [each for each in modules if isinstance(each, nn.Module) and each is not self.model]

    @property
    def model(self) -> Any:
        """The transformer."""
        return self._inner.transformer

    @property
    def device(self) -> torch.device:
        """Of the transformer."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def embed(self, prompts: Sequence[str]) -> Conditions:
        """Hidden states and pooled states of the text encoders; a prompt is cut if none of them takes it whole."""
        inner, limit = self._inner, 512 if self.is_flux else 256
        clip = [(inner.tokenizer, inner.tokenizer.model_max_length)]
        t5 = inner.tokenizer_2 if self.is_flux else inner.tokenizer_3
        count_cut(self, prompts, [*clip, (t5, limit)] if t5 is not None else clip)
        given: dict[str, Any] = {"device": self.device, "max_sequence_length": limit}
        with _quiet_diffusers():
            if self.is_flux:
                hidden, pooled, _ = inner.encode_prompt(list(prompts), None, **given)
            else:
                given["do_classifier_free_guidance"] = False
                hidden, _, pooled, _ = inner.encode_prompt(list(prompts), None, None, **given)
        return hidden, pooled

    def _guided(self, conditions: Conditions) -> Conditions:
        if self._negative is None:
            self._negative = self.embed([self.negative_prompt])
        pairs = zip(self._negative, conditions, strict=True)
        return tuple(torch.cat([negative.expand_as(own), own]) for negative, own in pairs)

    def training_embeds(self, conditions: Conditions) -> Conditions:
        """With `2 B` rows, negative ones first, or `B` without guidance."""
        return self._guided(conditions) if self.trains_guidance else conditions

    def set_timesteps(self) -> Tensor:
        """The sigmas of a trajectory, `(S + 1,)` from 1 to 0; the scheduler has the timesteps."""
        scheduler, transformer = self._inner.scheduler, self.model
        given: dict[str, Any] = (
            {"sigmas": np.linspace(1.0, 1 / self.num_steps, self.num_steps)} if self.is_flux else {}
        )
        if scheduler.config.get("use_dynamic_shifting"):
            side = self.size // self._inner.vae_scale_factor
            tokens = (side // (2 if self.is_flux else transformer.config.patch_size)) ** 2
            low, high = (
                scheduler.config.get(f"{name}_image_seq_len", default)
                for name, default in (("base", 256), ("max", 4096))
            )
            least, most = scheduler.config.get("base_shift", 0.5), scheduler.config.get("max_shift", 1.15)
            given["mu"] = least + (most - least) * (tokens - low) / (high - low)
        scheduler.set_timesteps(self.num_steps, device=self.device, **given)
        return scheduler.sigmas.to(self.device)

    def _velocity(self, latents: Tensor, timesteps: Tensor, embeds: Conditions, model: Any) -> Tensor:
        hidden, pooled = embeds
        rows = len(hidden)
        if self.is_flux:
            side = self.size // (2 * self._inner.vae_scale_factor)
            places = self._inner._prepare_latent_image_ids(rows, side, side, self.device, hidden.dtype)
            scale = torch.full((rows,), self.guidance_scale, device=self.device)
            times = timesteps.to(latents.dtype)  # diffusers rounds them for Flux, not for Stable Diffusion 3
            return model(
                hidden_states=latents, timestep=times / 1000, encoder_hidden_states=hidden, pooled_projections=pooled,
                guidance=scale if model.config.guidance_embeds else None,
                txt_ids=hidden.new_zeros(hidden.shape[1], 3), img_ids=places, return_dict=False,
            )[0]  # fmt: skip
        doubled = rows == 2 * len(latents)
        output = model(
            hidden_states=torch.cat([latents] * 2) if doubled else latents,
            timestep=torch.cat([timesteps] * 2) if doubled else timesteps,
            encoder_hidden_states=hidden, pooled_projections=pooled, return_dict=False,
        )[0]  # fmt: skip
        if not doubled:
            return output
        without, within = output.chunk(2)
        return without + self.guidance_scale * (within - without)

    @torch.no_grad()
    def sample(self, conditions: Conditions, generators: list[torch.Generator]) -> Trajectory:
        """Denoise by the stochastic equation."""
        sigmas, timesteps = self.set_timesteps(), self._inner.scheduler.timesteps.to(self.device)
        channels = self.model.config.in_channels // (4 if self.is_flux else 1)
        x: Any = self._inner.prepare_latents(
            len(conditions[0]), channels, self.size, self.size, conditions[0].dtype, self.device, generators
        )
        x = x[0] if self.is_flux else x
        embeds = self._guided(conditions) if self.is_guided else conditions
        own, latents, log_probs = self.training_embeds(conditions), [x], []
        for number in range(self.num_steps):
            at = timesteps[number].expand(len(x))
            velocity = self._velocity(x, at, embeds, self.model)
            step = self._step(velocity, x, sigmas, torch.full_like(at, number).long(), generators=generators)
            if self.is_guided and not self.trains_guidance:
                log_probs.append(self.step(x, at, step.latents, own).log_probs)
            else:
                log_probs.append(step.log_probs)
            x = step.latents
            latents.append(x)
        images = self.decode(x)
        return Trajectory(
            images, torch.stack(latents, 1), timesteps.expand(len(x), -1), torch.stack(log_probs, 1)
        )

    def _step(
        self, velocity: Tensor, latents: Tensor, sigmas: Tensor, numbers: Tensor, **given: Any
    ) -> DDPOSchedulerOutput:
        return flow_step(
            velocity, latents, sigmas[numbers], sigmas[numbers + 1],
            noise_level=self.noise_level, first_sigma=float(sigmas[1]), **given,
        )  # fmt: skip

    def step(
        self, latents: Tensor, timesteps: Tensor, next_latents: Tensor, embeds: Any, model: Any = None
    ) -> DDPOSchedulerOutput:
        """A step's log-probability."""
        velocity = self._velocity(latents, timesteps, embeds, self.model if model is None else model)
        every = self._inner.scheduler.timesteps.to(timesteps)
        numbers = (timesteps[:, None] - every).abs().argmin(dim=1)
        return self._step(
            velocity,
            latents,
            self._inner.scheduler.sigmas.to(self.device),
            numbers,
            next_latents=next_latents,
        )

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images in 0..1."""
        vae = self._inner.vae
        if self.is_flux:
            latents = self._inner._unpack_latents(latents, self.size, self.size, self._inner.vae_scale_factor)
        inputs = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return self._inner.image_processor.postprocess(
            vae.decode(inputs, return_dict=False)[0], output_type="pt"
        )

    def random_steps(self) -> Tensor:
        """All steps, bool `(S,)`. Raises ValueError for a noise level of 0, and for a single step."""
        if not self.noise_level > 0 or self.num_steps < 2:
            raise ValueError(
                f"noise_level must be > 0 and sample_num_steps >= 2, got {self.noise_level} and {self.num_steps}: without noise a "
                "step has no log-probability."
            )
        return torch.ones(self.num_steps, dtype=torch.bool)


@contextlib.contextmanager
def _quiet_diffusers() -> Iterator[None]:
    """A block in which diffusers logs errors alone: it warns of each prompt that an encoder cuts."""
    logging = import_diffusers().utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
