"""AlignProp: gradients of a differentiable reward through the sampler of a diffusion model."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl._lazy import attach
from trl.models.diffusion.policy import draw_step, generator_of
from trl.reporting.model_card import Paper
from trl.reporting.run_lines import long_bar
from trl.trainer.alignprop_config import AlignPropConfig
from trl.trainer.diffusion_trainer import TAGS, DiffusionTrainer

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

HIGHEST_SCORE = 10.0  # of the aesthetic scorer; no gradient depends on it


class AlignPropTrainer(DiffusionTrainer):
    """Trains a diffusion model on a differentiable reward of its images, through decoder and last denoising steps.

    The arguments are those of `DDPOTrainer`. Rewards must be a tensor `(B,)` with gradient. The hook gets a dict with
    `images`, `prompts`, `prompt_metadata` and `rewards` of the last batch, after each optimiser step that is a multiple
    of `log_image_freq`.

    Example:
        >>> trainer = AlignPropTrainer(config, reward_function, prompt_function, pipeline)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _name = "AlignProp"
    _tag_names: ClassVar[list[str]] = ["trl", "alignprop", *TAGS]
    _paper = Paper("Aligning Text-to-Image Diffusion Models with Reward Backpropagation", "2310.03739")
    _config_class: ClassVar[Any] = AlignPropConfig

    def step(self, epoch: int, global_step: int) -> int:
        """Sample `train_gradient_accumulation_steps` batches with gradient, and let the optimiser step once.

        Logs `reward_mean`, `reward_std` and `loss`; returns the number of optimiser steps so far.
        """
        self.policy.model.train()
        losses, rewards, count = [], [], self.config.train_gradient_accumulation_steps
        for number in long_bar(range(count), "sampling", self.accelerator.is_main_process):
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
        return global_step

    def sample_with_grad(self, epoch: int, number: int) -> dict[str, Any]:
        """A batch of images with gradient, with `prompts` and `prompt_metadata`.

        The first denoising step with a gradient is the same for all trajectories of a batch and all processes.
        """
        config, size = self.config, self.config.train_batch_size
        prompts, metadata = self._draw(size)
        first = (number * self.accelerator.num_processes + self.accelerator.process_index) * size
        at = config.truncated_backprop_timestep
        if config.truncated_backprop_rand:
            drawing = generator_of(config.seed, epoch, number, 0)
            at = draw_step(config.truncated_rand_backprop_minmax, config.sample_num_steps - 1, drawing)
        embeds = self.policy.embed(prompts)
        with self.autocast():
            found = self.policy.sample(embeds, self.generators(epoch, first, size), first_trained=at)
        return {"images": self._checked_images(found.images), "prompts": prompts, "prompt_metadata": metadata}

    def compute_rewards(self, prompt_image_pairs: Mapping[str, Any]) -> Tensor:
        """The rewards `(B,)` of a batch, with gradient.

        Raises: TypeError for rewards without a gradient; ValueError for another number, NaN and infinity.
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
        if rewards.numel() != len(images) or not rewards.isfinite().all():
            raise ValueError(
                f"expected a finite reward for each of {len(images)} images, got {rewards.flatten().tolist()}."
            )
        return rewards.flatten().to(torch.promote_types(rewards.dtype, torch.float32))

    def calculate_loss(self, rewards: Tensor) -> Tensor:
        """10 less the mean reward."""
        return HIGHEST_SCORE - rewards.mean()
