"""Stable Diffusion pipelines that return the latents and log-probabilities of their denoising steps."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trl.models.diffusion.ddim import DDPOSchedulerOutput, Generators, scheduler_step
from trl.models.diffusion.trained import TrainedPipeline, import_diffusers


@dataclass
class DDPOPipelineOutput:
    """Images in the `output_type` asked for, S + 1 latents `(B, C, h, w)` from noise to image, S log-probabilities `(B,)`."""

    images: Any
    latents: Any
    log_probs: Any


class _Member:
    """A member of the interface that a subclass must define: reading it raises TypeError."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, pipeline: Any, owner: type) -> Any:
        if pipeline is None:
            return self
        raise TypeError(
            f"{owner.__name__} does not define {self.name}, which trainers use. Add it to the class."
        )


class DDPOStableDiffusionPipeline:
    """The interface of the pipelines that `DDPOTrainer` and `AlignPropTrainer` train: subclass it.

    A call with `prompt_embeds`, `negative_prompt_embeds`, `num_inference_steps`, `guidance_scale`, `eta`, `generator` (a list
    with one for each image) and `output_type="pt"` returns a `DDPOPipelineOutput`; AlignProp calls `rgb_with_grad` instead, which
    keeps gradients. `scheduler_step` is the function of that name without its first argument, `autocast` makes the context of
    forward passes (None: the accelerator's), `get_trainable_layers()` returns the module or parameters to train.

    `save_checkpoint(models, weights, output_dir)` is called on the main process, `load_checkpoint(models, input_dir)` on every one,
    with the trained module in `models`.
    """

    unet: Any = _Member()
    vae: Any = _Member()
    tokenizer: Any = _Member()
    scheduler: Any = _Member()
    text_encoder: Any = _Member()
    autocast: Any = _Member()
    scheduler_step: Any = _Member()
    rgb_with_grad: Any = _Member()
    set_progress_bar_config: Any = _Member()
    get_trainable_layers: Any = _Member()
    save_pretrained: Any = _Member()
    save_checkpoint: Any = _Member()
    load_checkpoint: Any = _Member()

    def __call__(self, *args: Any, **kwargs: Any) -> DDPOPipelineOutput:
        """Denoise. Raises TypeError in this class."""
        raise TypeError(
            f"{type(self).__name__} does not define __call__, which trainers use. Add it to the class."
        )


class DefaultDDPOStableDiffusionPipeline(TrainedPipeline, DDPOStableDiffusionPipeline):
    """A Stable Diffusion pipeline of diffusers, with a DDIM scheduler and without safety checker.

    `pretrained_model_name` is a Hub name, a folder, or a `StableDiffusionPipeline`. LoRA weights beside the model are loaded, and
    `use_lora` is then True. With `use_lora` only the adapter is trained, else the UNet.
    """

    def __init__(
        self,
        pretrained_model_name: Any,
        *,
        pretrained_model_revision: str = "main",
        use_lora: bool = True,
    ) -> None:
        diffusers = import_diffusers()
        self.pretrained_model, self.pretrained_revision = pretrained_model_name, pretrained_model_revision
        given = pretrained_model_name
        if not isinstance(given, diffusers.StableDiffusionPipeline):
            given = diffusers.StableDiffusionPipeline.from_pretrained(
                given, revision=pretrained_model_revision
            )
        self.sd_pipeline, self.use_lora = given, use_lora
        self.sd_pipeline.scheduler = diffusers.DDIMScheduler.from_config(self.sd_pipeline.scheduler.config)
        self.sd_pipeline.safety_checker = None
        for frozen in (self.vae, self.text_encoder):
            frozen.requires_grad_(False)
        self._load_lora()
        self.unet.requires_grad_(not self.use_lora)

    def __call__(self, *args: Any, **kwargs: Any) -> DDPOPipelineOutput:
        """`pipeline_step` of this pipeline."""
        return pipeline_step(self.sd_pipeline, *args, **kwargs)

    def rgb_with_grad(self, *args: Any, **kwargs: Any) -> DDPOPipelineOutput:
        """`pipeline_step_with_grad` of this pipeline."""
        return pipeline_step_with_grad(self.sd_pipeline, *args, **kwargs)

    def scheduler_step(self, *args: Any, **kwargs: Any) -> DDPOSchedulerOutput:
        """`scheduler_step` of this pipeline's scheduler."""
        return scheduler_step(self.scheduler, *args, **kwargs)

    unet = property(lambda self: self.sd_pipeline.unet)
    vae = property(lambda self: self.sd_pipeline.vae)
    tokenizer = property(lambda self: self.sd_pipeline.tokenizer)
    scheduler = property(lambda self: self.sd_pipeline.scheduler)
    text_encoder = property(lambda self: self.sd_pipeline.text_encoder)


def pipeline_step(
    pipeline: Any,
    prompt: str | list[str] | None = None,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int = 50,
    guidance_scale: float = 7.5,
    negative_prompt: str | list[str] | None = None,
    num_images_per_prompt: int | None = 1,
    eta: float = 0.0,
    generator: Generators = None,
    latents: Tensor | None = None,
    prompt_embeds: Tensor | None = None,
    negative_prompt_embeds: Tensor | None = None,
    output_type: str | None = "pil",
    return_dict: bool = True,
    callback: Callable[[int, int, Tensor], None] | None = None,
    callback_steps: int = 1,
    cross_attention_kwargs: dict[str, Any] | None = None,
    guidance_rescale: float = 0.0,
) -> Any:
    """Images of a `StableDiffusionPipeline` without gradient; arguments as in diffusers.

    Returns a `DDPOPipelineOutput`, or its fields as a tuple without `return_dict`.
    """
    with torch.no_grad():
        return _denoise(**locals())


def pipeline_step_with_grad(
    pipeline: Any,
    prompt: str | list[str] | None = None,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int = 50,
    guidance_scale: float = 7.5,
    truncated_backprop: bool = True,
    truncated_backprop_rand: bool = True,
    gradient_checkpoint: bool = True,
    truncated_backprop_timestep: int = 49,
    truncated_rand_backprop_minmax: tuple[int, int] = (0, 50),
    negative_prompt: str | list[str] | None = None,
    num_images_per_prompt: int | None = 1,
    eta: float = 0.0,
    generator: Generators = None,
    latents: Tensor | None = None,
    prompt_embeds: Tensor | None = None,
    negative_prompt_embeds: Tensor | None = None,
    output_type: str | None = "pil",
    return_dict: bool = True,
    callback: Callable[[int, int, Tensor], None] | None = None,
    callback_steps: int = 1,
    cross_attention_kwargs: dict[str, Any] | None = None,
    guidance_rescale: float = 0.0,
) -> Any:
    """Images with gradient through the sampler, from the UNet's outputs at step K (0 is the noisiest) and later.

    K is 0 without `truncated_backprop`; else `truncated_backprop_timestep`, or with `truncated_backprop_rand` drawn once for the
    trajectory, uniformly between the two bounds (both included, at most the last step). `gradient_checkpoint` recomputes the
    UNet in the backward pass. Source: Prabhudesai et al. 2023, section 4 (arXiv:2310.03739).

    Raises: ValueError for a step that the trajectory does not have.
    """
    given = dict(locals())
    for name in ("truncated_backprop_rand", "truncated_backprop_timestep", "truncated_rand_backprop_minmax"):
        del given[name]
    first, last = 0, num_inference_steps - 1
    if given.pop("truncated_backprop"):
        first = truncated_backprop_timestep
        if truncated_backprop_rand:
            lowest, highest = truncated_rand_backprop_minmax
            first = random.randint(lowest, max(min(highest, last), lowest))
        if not 0 <= first <= last:
            raise ValueError(
                f"gradients start at step {first}, and {num_inference_steps} steps end at {last}. Lower "
                "truncated_backprop_timestep or truncated_rand_backprop_minmax, or take more steps."
            )
    return _denoise(**given, first_trained=first)


def _denoise(
    *, pipeline: Any, prompt: Any, height: int | None, width: int | None, num_inference_steps: int, guidance_scale: float,
    negative_prompt: Any, num_images_per_prompt: int | None, eta: float, generator: Generators, latents: Tensor | None,
    prompt_embeds: Tensor | None, negative_prompt_embeds: Tensor | None, output_type: str | None, return_dict: bool,
    callback: Callable[[int, int, Tensor], None] | None, callback_steps: int, cross_attention_kwargs: dict[str, Any] | None,
    guidance_rescale: float, first_trained: int | None = None, gradient_checkpoint: bool = False,
) -> Any:  # fmt: skip
    """Both pipeline steps; `first_trained` is the step from which the UNet's outputs have a gradient (None: no step)."""
    scheduler, device, guided = pipeline.scheduler, pipeline._execution_device, guidance_scale > 1
    positive, negative = pipeline.encode_prompt(
        prompt, device, num_images_per_prompt or 1, guided, negative_prompt,
        prompt_embeds=prompt_embeds, negative_prompt_embeds=negative_prompt_embeds,
    )  # fmt: skip
    embeds = torch.cat([negative, positive]) if guided else positive
    scheduler.set_timesteps(num_inference_steps, device=device)
    size = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    sources = list(generator) if isinstance(generator, (list, tuple)) else generator
    x = pipeline.prepare_latents(
        len(positive), pipeline.unet.config.in_channels, height or size, width or size, positive.dtype, device,
        sources, latents,
    )  # fmt: skip
    all_latents, log_probs = [x], []

    def predict(x: Tensor, timestep: Tensor) -> Tensor:
        return predict_noise(
            pipeline.unet, x, timestep, embeds, guidance_scale if guided else None,
            rescale=guidance_rescale, cross_attention_kwargs=cross_attention_kwargs,
        )  # fmt: skip

    for number, timestep in enumerate(pipeline.progress_bar(scheduler.timesteps)):
        is_trained = first_trained is not None and number >= first_trained
        with contextlib.nullcontext() if is_trained else torch.no_grad():
            if is_trained and gradient_checkpoint:
                output: Any = checkpoint(predict, x, timestep, use_reentrant=False)
            else:
                output = predict(x, timestep)
        step = scheduler_step(scheduler, output, timestep, x, eta, generator=sources)
        x = step.latents
        all_latents.append(x)
        log_probs.append(step.log_probs)
        if callback is not None and number % callback_steps == 0:
            callback(number, timestep, x)
    images = x if output_type == "latent" else decode_latents(pipeline, x, output_type)
    return (
        DDPOPipelineOutput(images, all_latents, log_probs)
        if return_dict
        else (images, all_latents, log_probs)
    )


def predict_noise(
    unet: Any,
    x: Tensor,
    timestep: Any,
    embeds: Tensor,
    guidance: float | None,
    *,
    rescale: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """The UNet's output for latents `(B, C, h, w)`; with `guidance` embeds are `(2 B, ...)`, the negative ones first.

    Source: Ho and Salimans 2022, eq. 6 (arXiv:2207.12598), with weight `guidance - 1`; `rescale` as Lin et al. 2023, eq. 16
    (arXiv:2305.08891).
    """
    times = torch.as_tensor(timestep, device=x.device).expand(len(x))
    if guidance is None:
        return unet(x, times, encoder_hidden_states=embeds, **kwargs).sample
    both = unet(torch.cat([x] * 2), torch.cat([times] * 2), encoder_hidden_states=embeds, **kwargs).sample
    without, within = both.chunk(2)
    output = without + guidance * (within - without)
    if rescale:
        axes = tuple(range(1, output.ndim))
        same = output * within.std(axes, keepdim=True) / output.std(axes, keepdim=True)
        output = rescale * same + (1 - rescale) * output
    return output


def decode_latents(pipeline: Any, latents: Tensor, output_type: str | None) -> Any:
    """Images of latents; what a safety checker flags becomes black, as in diffusers."""
    vae = pipeline.vae
    images = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
    images, flagged = pipeline.run_safety_checker(images, images.device, images.dtype)
    shown = [True] * len(images) if flagged is None else [not each for each in flagged]
    return pipeline.image_processor.postprocess(images, output_type=output_type, do_denormalize=shown)
