"""AlignProp: gradients of a differentiable reward through the sampler of a diffusion model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl.models.diffusion.policy import DDIMPolicy, generator_of
from trl.models.diffusion.stable_diffusion import DDPOStableDiffusionPipeline
from trl.objectives.diffusion import clipped_ratio_loss
from trl.trainer.alignprop_config import AlignPropConfig
from trl.trainer.ddpo_trainer import PromptFunction, RewardFunction
from trl.trainer.diffusion_trainer import DiffusionTrainer

logger = logging.getLogger(__name__)

_CITATION = """@article{prabhudesai2023aligning,
    title   = {Aligning Text-to-Image Diffusion Models with Reward Backpropagation},
    author  = {Prabhudesai, Mihir and Goyal, Anirudh and Pathak, Deepak and Fragkiadaki, Katerina},
    journal = {arXiv preprint arXiv:2310.03739},
    year    = {2023}
}"""
HIGHEST_SCORE = 10.0  # of the aesthetic scorer; no gradient depends on it


class AlignPropTrainer(DiffusionTrainer):
    """Trains a diffusion model on a differentiable reward of its images, through the decoder and the last denoising steps.

    The arguments are those of `DDPOTrainer`. Rewards must be a tensor `(B,)` with gradient. The hook gets a dict with `images`,
    `prompts`, `prompt_metadata` and `rewards` of the last batch, after each optimiser step that is a multiple of
    `log_image_freq`.

    Example:
        >>> trainer = AlignPropTrainer(config, reward_function, prompt_function, pipeline)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _name = "AlignProp"
    _tag_names: ClassVar[list[str]] = [
        "trl",
        "alignprop",
        "diffusers",
        "reinforcement-learning",
        "text-to-image",
    ]
    _paper: ClassVar[dict[str, str]] = {
        "title": "Aligning Text-to-Image Diffusion Models with Reward Backpropagation", "id": "2310.03739",
        "citation": _CITATION,
    }  # fmt: skip
    _config_class: ClassVar[Any] = AlignPropConfig
    policy: Any

    def __init__(
        self,
        config: AlignPropConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: DDPOStableDiffusionPipeline,
        image_samples_hook: Callable[[Any, Any, Any], Any] | None = None,
    ) -> None:
        def policy() -> DDIMPolicy:
            return DDIMPolicy(
                sd_pipeline,
                num_steps=config.sample_num_steps,
                eta=config.sample_eta,
                guidance_scale=config.sample_guidance_scale,
                negative_prompt=config.negative_prompts,
            )

        self.prompt_fn, self.reward_fn = prompt_function, reward_function
        super().__init__(config, policy, image_samples_hook)
        self.neg_prompt_embed = self.policy.negative
        self.resume()

    def step(self, epoch: int, global_step: int) -> int:
        """Sample `train_gradient_accumulation_steps` batches with gradient, and let the optimiser step once.

        Logs `reward_mean`, `reward_std` and `loss`; returns the number of optimiser steps so far.
        """
        self.policy.model.train()
        losses, rewards, count = [], [], self.config.train_gradient_accumulation_steps
        for number in range(count):
            pairs = self.sample_with_grad(epoch, number)
            found = self.compute_rewards(pairs)
            pairs["rewards"] = found
            loss = self.calculate_loss(found)
            self.accelerator.backward(loss / count)
            losses.append(loss)
            rewards.append(found.detach())
        self._update(global_step)
        every: Any = self.accelerator.gather(torch.cat(rewards))
        statistics = {"reward_mean": float(every.mean()), "reward_std": float(every.std(unbiased=False))}
        global_step += 1
        self.log({**statistics, "loss": self._mean(losses), "epoch": epoch}, global_step)
        if global_step % self.config.log_image_freq == 0:
            shown = {name: v.detach() if isinstance(v, Tensor) else v for name, v in pairs.items()}  # pyright: ignore[reportPossiblyUnbound]
            self._show_images(shown, global_step)
        self._save_if_due(epoch, global_step)
        return global_step

    def first_step(self, epoch: int, number: int) -> int:
        """The first denoising step whose output has a gradient, the same for all trajectories of a batch and all processes."""
        if not self.config.truncated_backprop_rand:
            return self.config.truncated_backprop_timestep
        lowest, highest = self.config.truncated_rand_backprop_minmax
        last = max(min(highest, self.config.sample_num_steps - 1), lowest)
        generator = generator_of(self.config.seed, epoch, number, 0)
        return int(torch.randint(lowest, last + 1, (1,), generator=generator))

    def sample_with_grad(self, epoch: int, number: int) -> dict[str, Any]:
        """A batch of images with gradient, with `prompts` and `prompt_metadata`."""
        size = self.config.train_batch_size
        prompts, metadata = self._draw(size)
        first = (number * self.accelerator.num_processes + self.accelerator.process_index) * size
        given = self.policy.sampling(self.policy.embed(prompts), self.generators(epoch, first, size))
        with self.autocast():
            found = self.sd_pipeline.rgb_with_grad(
                **given,
                truncated_backprop_rand=False,
                truncated_backprop_timestep=self.first_step(epoch, number),
            )
        return {"images": self._checked_images(found.images), "prompts": prompts, "prompt_metadata": metadata}

    def compute_rewards(self, prompt_image_pairs: Mapping[str, Any]) -> Tensor:
        """The rewards `(B,)` of a batch, with gradient.

        Raises: TypeError for rewards that are no tensor with a gradient; ValueError for another number, and NaN or infinity.
        """
        images = prompt_image_pairs["images"]
        rewards, _ = self.call_reward_function(
            images, prompt_image_pairs["prompts"], prompt_image_pairs["prompt_metadata"]
        )
        if not isinstance(rewards, Tensor) or not rewards.requires_grad:
            raise TypeError(
                "AlignProp needs rewards with a gradient to the images: a tensor computed from them by torch, without "
                f"torch.no_grad() or .item(), got a {type(rewards).__name__}. Use DDPO for other rewards."
            )
        if rewards.numel() != len(images):
            raise ValueError(f"the reward function gave {rewards.numel()} rewards for {len(images)} images.")
        if not rewards.isfinite().all():
            row = int((~rewards.flatten().isfinite()).nonzero()[0])
            raise ValueError(
                f"the reward function gave {rewards.flatten()[row].item()} for the image of "
                f"{prompt_image_pairs['prompts'][row]!r}, expected a finite number."
            )
        return rewards.flatten().to(torch.promote_types(rewards.dtype, torch.float32))

    def calculate_loss(self, rewards: Tensor) -> Tensor:
        """10 less the mean reward."""
        return HIGHEST_SCORE - rewards.mean()

    def loss(self, advantages: Tensor, clip_range: float, ratio: Tensor) -> Tensor:
        """PPO's clipped surrogate, as in `DDPOTrainer`; not part of AlignProp."""
        return clipped_ratio_loss(ratio, advantages, clip_range).mean()
