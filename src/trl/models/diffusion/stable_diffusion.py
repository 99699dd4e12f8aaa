"""Stable Diffusion pipelines that return the latents and log-probabilities of their denoising steps."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trl.models.diffusion.ddim import DDPOSchedulerOutput, Generators, deviations, scheduler_step
from trl.models.diffusion.policy import Conditions, DiffusionPolicy, denoise, draw_step, with_guidance
from trl.models.diffusion.trained import TrainedPipeline, import_diffusers
from trl.models.packed.layout import Inputs


@dataclass
class DDPOPipelineOutput:
    """Images and their denoising in S steps."""

    images: Any  # in the `output_type` asked for
    latents: Any  # S + 1 tensors, (B, C, h, w), from noise to image
    log_probs: Any  # S tensors, (B,)


class DDPOStableDiffusionPipeline:
    """The interface of the pipelines that `DDPOTrainer` and `AlignPropTrainer` train: subclass it.

    The members `unet`, `vae`, `tokenizer`, `text_encoder`, `scheduler`, and `autocast`, which makes the context of
    forward passes (None: the accelerator's); the methods `set_progress_bar_config(**kwargs)`,
    `save_pretrained(folder)`, and these:

    - `__call__` with `prompt_embeds`, `negative_prompt_embeds`, `num_inference_steps`, `guidance_scale`, `eta`,
      `generator` (a list with one for each image) and `output_type="pt"` returns a `DDPOPipelineOutput`. AlignProp
      calls `rgb_with_grad` instead, which keeps gradients, with the arguments of `pipeline_step_with_grad`.
    - `scheduler_step` is the function of that name without its first argument.
    - `get_trainable_layers()` returns the module or parameters to train.
    - `save_checkpoint(models, weights, output_dir)` is called on the main process, `load_checkpoint(models, input_dir)`
      on every one, with the trained module in `models`.
    """


class DefaultDDPOStableDiffusionPipeline(TrainedPipeline, DDPOStableDiffusionPipeline):
    """A `StableDiffusionPipeline` of diffusers with a DDIM scheduler, no safety checker; the UNet is trained."""

    def _settle(self) -> None:
        self.sd_pipeline.scheduler = import_diffusers().DDIMScheduler.from_config(self.scheduler.config)
        self.sd_pipeline.safety_checker = None

    def __call__(self, *args: Any, **kwargs: Any) -> DDPOPipelineOutput:
        return pipeline_step(self.sd_pipeline, *args, **kwargs)

    def rgb_with_grad(self, *args: Any, **kwargs: Any) -> DDPOPipelineOutput:
        return pipeline_step_with_grad(self.sd_pipeline, *args, **kwargs)

    def scheduler_step(self, *args: Any, **kwargs: Any) -> DDPOSchedulerOutput:
        return scheduler_step(self.scheduler, *args, **kwargs)

    unet = property(lambda self: self.sd_pipeline.unet)
    vae = property(lambda self: self.sd_pipeline.vae)
    tokenizer = property(lambda self: self.sd_pipeline.tokenizer)
    scheduler = property(lambda self: self.sd_pipeline.scheduler)
    text_encoder = property(lambda self: self.sd_pipeline.text_encoder)


def pipeline_step(
    pipeline: Any, prompt: str | list[str] | None = None, height: int | None = None, width: int | None = None,
    num_inference_steps: int = 50, guidance_scale: float = 7.5,
    negative_prompt: str | list[str] | None = None, num_images_per_prompt: int | None = 1, eta: float = 0.0,
    generator: Generators = None, latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
    negative_prompt_embeds: Tensor | None = None, output_type: str | None = "pil", return_dict: bool = True,
    callback: Callable[[int, int, Tensor], None] | None = None, callback_steps: int = 1,
    cross_attention_kwargs: Inputs | None = None, guidance_rescale: float = 0.0,
) -> Any:  # fmt: skip
    """Images of a `StableDiffusionPipeline` without gradient; arguments as in diffusers.

    Returns a `DDPOPipelineOutput`, or its fields as a tuple without `return_dict`.
    """
    with torch.no_grad():
        return pipeline_step_with_grad(**locals(), truncated_backprop=False)


def pipeline_step_with_grad(
    pipeline: Any, prompt: str | list[str] | None = None, height: int | None = None, width: int | None = None,
    num_inference_steps: int = 50, guidance_scale: float = 7.5,
    truncated_backprop: bool = True, truncated_backprop_rand: bool = True, gradient_checkpoint: bool = True,
    truncated_backprop_timestep: int = 49, truncated_rand_backprop_minmax: tuple[int, int] = (0, 50),
    negative_prompt: str | list[str] | None = None, num_images_per_prompt: int | None = 1, eta: float = 0.0,
    generator: Generators = None, latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
    negative_prompt_embeds: Tensor | None = None, output_type: str | None = "pil", return_dict: bool = True,
    callback: Callable[[int, int, Tensor], None] | None = None, callback_steps: int = 1,
    cross_attention_kwargs: Inputs | None = None, guidance_rescale: float = 0.0,
) -> Any:  # fmt: skip
    """Images with gradient through the sampler, from the UNet's outputs at step K (0 is the noisiest) and later.

    K is 0 without `truncated_backprop`; else `truncated_backprop_timestep`, or with `truncated_backprop_rand` drawn
    once for the trajectory, uniformly between the two bounds (both included, at most the last step).
    `gradient_checkpoint` recomputes the UNet in the backward pass. Source: Prabhudesai et al. 2023, section 4
    (arXiv:2310.03739). Raises: ValueError for a step that the trajectory does not have.
    """
    first, last = 0, num_inference_steps - 1
    if truncated_backprop:
        bounds = truncated_rand_backprop_minmax
        first = draw_step(bounds, last) if truncated_backprop_rand else truncated_backprop_timestep
        if not 0 <= first <= last:
            raise ValueError(
                f"gradients start at step {first}, and {num_inference_steps} steps end at {last}. Lower "
                "truncated_backprop_timestep or truncated_rand_backprop_minmax, or take more steps."
            )
    device, guidance = pipeline._execution_device, guidance_scale if guidance_scale > 1 else None
    known = {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds}
    asked = prompt, device, num_images_per_prompt or 1, guidance is not None, negative_prompt
    positive, negative = pipeline.encode_prompt(*asked, **known)
    embeds = positive if guidance is None else torch.cat([negative, positive])
    scheduler = copy.deepcopy(pipeline.scheduler)  # another thread may sample, too
    for schedule in (scheduler, pipeline.scheduler):
        schedule.set_timesteps(num_inference_steps, device=device)
    size = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    sources = list(generator) if isinstance(generator, (list, tuple)) else generator
    shape = len(positive), pipeline.unet.config.in_channels, height or size, width or size
    x = pipeline.prepare_latents(*shape, positive.dtype, device, sources, latents)

    def predict(x: Tensor, timestep: Tensor) -> Tensor:
        return predict_noise(
            pipeline.unet, x, timestep, embeds, guidance,
            rescale=guidance_rescale, cross_attention_kwargs=cross_attention_kwargs,
        )  # fmt: skip

    def step(output: Tensor, number: int, x: Tensor) -> DDPOSchedulerOutput:
        timestep = scheduler.timesteps[number]
        drawn = scheduler_step(scheduler, output, timestep, x, eta, generator=sources)
        if callback is not None and number % callback_steps == 0:
            callback(number, timestep, drawn.latents)
        return drawn

    times = pipeline.progress_bar(scheduler.timesteps)
    all_latents, log_probs = denoise(x, times, predict, step, first_trained=first, recomputes=gradient_checkpoint)
    x = all_latents[-1]
    images = x if output_type == "latent" else decode_latents(pipeline, x, output_type)
    outputs = images, all_latents, log_probs
    return DDPOPipelineOutput(*outputs) if return_dict else outputs


def predict_noise(
    unet: nn.Module, x: Tensor, timestep: int | Tensor, embeds: Tensor, guidance: float | None, *,
    rescale: float = 0.0, **kwargs: object,
) -> Tensor:  # fmt: skip
    """The UNet's output for latents `(B, C, h, w)`; with `guidance` embeds are `(2 B, ...)`, negative ones first."""

    def forward(x: Tensor, times: Tensor) -> Tensor:
        return unet(x, times, encoder_hidden_states=embeds, **kwargs).sample

    return with_guidance(forward, x, torch.as_tensor(timestep, device=x.device).expand(len(x)), guidance, rescale)


def decode_latents(pipeline: Any, latents: Tensor, output_type: str | None) -> Any:
    """Images of latents; what a safety checker flags becomes black, as in diffusers."""
    vae = pipeline.vae
    images = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
    images, flagged = pipeline.run_safety_checker(images, images.device, images.dtype)
    shown = [True] * len(images) if flagged is None else [not flag for flag in flagged]
    return pipeline.image_processor.postprocess(images, output_type=output_type, do_denormalize=shown)


class DDIMPolicy(DiffusionPolicy):
    """A `DDPOStableDiffusionPipeline` as a policy; without a `scheduler_step` of its own, the scheduler is DDIM."""

    def __init__(self, pipeline: Any, **settings: Any) -> None:
        super().__init__(pipeline, **settings)
        self._take_scheduler()
        default = DefaultDDPOStableDiffusionPipeline.scheduler_step
        self._steps_itself = getattr(type(pipeline), "scheduler_step", None) is not default

    def _take_scheduler(self) -> None:
        self.scheduler = copy.deepcopy(self.pipeline.scheduler)
        self.scheduler.set_timesteps(self.num_steps)
        self.timesteps = self.scheduler.timesteps

    @property
    def frozen(self) -> list[nn.Module]:
        return [self.pipeline.vae, self.pipeline.text_encoder]

    @property
    def model(self) -> Any:
        return self.pipeline.unet

    @torch.no_grad()
    def embed(self, prompts: Sequence[str]) -> Conditions:
        """Hidden states of the text encoder, `(B, T, D)`."""
        tokenizer, encoder = self.pipeline.tokenizer, self.pipeline.text_encoder
        limit = tokenizer.model_max_length
        self._count_cut(prompts, [(tokenizer, limit)])
        ids = tokenizer(list(prompts), padding="max_length", max_length=limit, truncation=True, return_tensors="pt")
        return (encoder(ids.input_ids.to(next(encoder.parameters()).device))[0],)

    def training_embeds(self, conditions: Conditions) -> Tensor:
        """`(2 B, T, D)`, negative ones first, or `(B, T, D)` without guidance."""
        return super().training_embeds(conditions)[0]

    def begin_training(self) -> None:
        """Also set the timesteps of the pipeline's scheduler, which a trainer's own `calculate_loss` may read."""
        super().begin_training()
        self.pipeline.scheduler.set_timesteps(self.num_steps)

    def _denoise(
        self, conditions: Conditions, generators: list[torch.Generator], first_trained: int | None
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        (embeds,), (negative,) = conditions, self.negative
        options = {
            "prompt_embeds": embeds, "negative_prompt_embeds": negative.expand_as(embeds), "eta": self.noise,
            "num_inference_steps": self.num_steps, "guidance_scale": self.guidance_scale, "generator": generators,
            "output_type": "pt",
        }  # fmt: skip
        method, pipeline = "__call__", self.pipeline
        if first_trained is not None:
            method = "rgb_with_grad"
            options |= {"truncated_backprop_rand": False, "truncated_backprop_timestep": first_trained}
        default = getattr(DefaultDDPOStableDiffusionPipeline, method)
        if getattr(type(pipeline), method, None) is default:  # sampled by the policy's scheduler
            pipeline = copy.copy(pipeline)
            pipeline.sd_pipeline = copy.copy(pipeline.sd_pipeline)
            pipeline.sd_pipeline.scheduler = self.scheduler
        outputs = getattr(pipeline, method)(**options)
        if pipeline is self.pipeline:
            self._take_scheduler()
        return outputs.images, outputs.latents, outputs.log_probs

    def step(
        self, latents: Tensor, timesteps: Tensor, next_latents: Tensor, embeds: Tensor, model: nn.Module | None = None
    ) -> DDPOSchedulerOutput:
        guidance = self.guidance_scale if len(embeds) == 2 * len(latents) else None
        output = predict_noise(self.model if model is None else model, latents, timesteps, embeds, guidance)
        options: Inputs = {"eta": self.noise, "prev_sample": next_latents}
        if not self._steps_itself:
            return scheduler_step(self.scheduler, output, timesteps, latents, **options)
        self.pipeline.scheduler.set_timesteps(self.num_steps)
        return self.pipeline.scheduler_step(output, timesteps, latents, **options)

    def decode(self, latents: Tensor) -> Tensor:
        return decode_latents(getattr(self.pipeline, "sd_pipeline", self.pipeline), latents, "pt")

    def random_steps(self) -> Tensor:
        """The steps with noise, bool `(S,)`. Raises ValueError for eta 0 and for another scheduler than DDIM."""
        if not self.noise > 0:
            raise ValueError(f"sample_eta must be > 0, got {self.noise}: without noise a step has no log-probability.")
        kind = type(self.scheduler).__name__
        if kind == "DDIMScheduler":
            return deviations(self.scheduler, self.timesteps, self.noise) > 0
        if self._steps_itself:
            return torch.ones(len(self.timesteps), dtype=torch.bool)
        raise ValueError(
            f"the scheduler must be a DDIMScheduler, whose steps have a log-probability, got {kind}. Set scheduler = "
            "DDIMScheduler.from_config(scheduler.config)."
        )
