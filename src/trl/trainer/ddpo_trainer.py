"""DDPO: policy gradients over the denoising steps of a diffusion model."""

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl._lazy import attach
from trl.models.diffusion.ddim import DDPOSchedulerOutput
from trl.models.diffusion.policy import Conditions, generator_of
from trl.objectives.diffusion import PerPromptStatTracker
from trl.objectives.kl import LARGEST_LOG_RATIO
from trl.reporting.deadlines import DaemonThreads
from trl.reporting.model_card import Paper
from trl.reporting.run_lines import long_bar
from trl.rewards.result import read_scores
from trl.trainer.ddpo_config import DDPOConfig, PolicyGradientOptions
from trl.trainer.diffusion_trainer import TAGS, DiffusionTrainer

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

Batch = tuple[Tensor, tuple[str, ...], tuple[Any, ...]]
"""Images, prompts, metadata."""


class Images(NamedTuple):
    """The images of an epoch: those of a process, batch after batch."""

    batches: list[Batch]
    conditions: Conditions
    latents: Tensor  # (N, S + 1, ...)
    timesteps: Tensor  # (N, S)
    log_probs: Tensor  # (N, S)
    rewards: list[Tensor]  # (B,) each
    reward_metadata: list[Any]
    numbers: list[int]  # of the images in the epoch, over all processes


class DDPOTrainer(DiffusionTrainer):
    """Trains a diffusion model on rewards of its images by DDPO: each denoising step is an action with a
    log-probability.

    Args:
        config: its settings.
        reward_function: `(images, prompts, metadata) -> (rewards, reward_metadata)`, plain or async. Images are `(B, 3,
            H, W)` in 0..1, prompts and metadata tuples of length B, rewards B numbers.
        prompt_function: returns `(prompt, metadata)`, called once for each image.
        sd_pipeline: the pipeline to train.
        image_samples_hook: `(images, global_step, tracker)`, called on the main process before each epoch's training.
            `images` is a list with an entry `[images, prompts, metadata, rewards, reward_metadata]` for each of its
            batches; `tracker` is None without `log_with`.

    Example:
        >>> trainer = DDPOTrainer(config, reward_function, prompt_function, pipeline)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _name = "DDPO"
    _tag_names: ClassVar[list[str]] = ["trl", "ddpo", *TAGS]
    _paper = Paper("Training Diffusion Models with Reinforcement Learning", "2305.13301")
    _config_class: ClassVar[Any] = DDPOConfig

    def set_up(self) -> None:
        """Check the batch sizes, choose the trained denoising steps, and start the threads of async rewards."""
        check_batch_sizes(self.config, self.accelerator.num_processes)
        self._random_steps = self.policy.random_steps().nonzero()[:, 0].tolist()
        steps, share = self.config.sample_num_steps, self.config.train_timestep_fraction
        self.num_train_timesteps = min(int(steps * share), len(self._random_steps))
        if not self.num_train_timesteps:
            raise ValueError(
                f"no denoising step is trained: {len(self._random_steps)} draw noise, sample_num_steps={steps}, "
                f"train_timestep_fraction={share}. Raise one of them."
            )
        self.executor = DaemonThreads(self.config.max_workers)

    @cached_property
    def stat_tracker(self) -> PerPromptStatTracker:
        """The rewards remembered of each prompt, with `per_prompt_stat_tracking`."""
        config = self.config
        sizes = config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count
        return PerPromptStatTracker(*sizes)

    # ---- an epoch

    def step(self, epoch: int, global_step: int) -> int:
        """Sample, score and train one epoch; returns the number of optimiser steps so far.

        Logs `reward` (all), `reward_mean`, `reward_std`, then per step `loss`, `approx_kl`, `clipfrac`, `inner_epoch`.
        """
        self.policy.model.eval()
        images = self.sample_images(epoch)
        scored = zip(images.batches, images.rewards, images.reward_metadata, strict=True)
        self._show_images([[*batch, *found] for batch, *found in scored], global_step)
        rewards = self.accelerator.gather(torch.cat(images.rewards))
        advantages = self.advantages(images, rewards)  # type: ignore[arg-type]
        self.log(self.reward_statistics(images, rewards) | {"epoch": epoch}, global_step)  # type: ignore[arg-type]
        self.policy.begin_training()
        for inner_epoch in range(self.config.train_num_inner_epochs):
            global_step = self._train_once(images, advantages, epoch, inner_epoch, global_step)
        return global_step

    def sample_images(self, epoch: int) -> Images:
        """The images of an epoch of this process, with their rewards."""
        size, count = self.config.sample_batch_size, self.config.sample_num_batches_per_epoch
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        batches, trajectories, pending, numbers = list[Batch](), [], [], []
        drawn = [self.draw_prompts(epoch, batch) for batch in range(count)]
        # Before async rewards start: tokenizers serve one thread at a time.
        conditions = [self.policy.embed(prompts) for prompts, _ in drawn]
        inputs = long_bar(list(zip(drawn, conditions, strict=True)), "sampling", self.accelerator.is_main_process)
        for batch, ((prompts, metadata), embeds) in enumerate(inputs):
            first = (batch * processes + index) * size
            with self.autocast():
                found = self.policy.sample(embeds, self.generators(epoch, first, size))
            batches.append((self._checked_images(found.images), prompts, metadata))
            trajectories.append((found.latents, found.timesteps, found.log_probs))
            numbers += range(first, first + size)
            if self.config.async_reward_computation:  # while the next batch is sampled
                pending.append(self.executor.submit(self.compute_rewards, batches[-1:]))
        scored = [each.result() for each in pending] or [self.compute_rewards(batches)]
        rewards, reward_metadata = ([each for found in scored for each in found[part]] for part in (0, 1))
        latents, timesteps, log_probs = map(torch.cat, zip(*trajectories, strict=True))
        joined = tuple(map(torch.cat, zip(*conditions, strict=True)))
        return Images(batches, joined, latents, timesteps, log_probs, rewards, reward_metadata, numbers)

    def draw_prompts(self, epoch: int, batch: int) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The prompts of a batch of this process, with their metadata."""
        return self._draw(self.config.sample_batch_size)

    def compute_rewards(
        self, prompt_image_pairs: Sequence[Batch], is_async: bool = False
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Rewards `(B,)` and their metadata of batches `(images, prompts, metadata)`: one call for each batch.

        `is_async` calls it for several batches at a time. Raises ValueError for rewards that are not B finite numbers.
        """
        wide = torch.float32 if self.accelerator.device.type == "mps" else torch.float64  # which MPS lacks

        def score(batch: Batch) -> tuple[Tensor, Any]:
            given, metadata = self.call_reward_function(*batch)
            found = read_scores(given, count=len(batch[0]), name="reward_function", of="image")
            return torch.tensor(found, dtype=wide, device=self.accelerator.device), metadata

        every = self.executor.map(score, prompt_image_pairs) if is_async else map(score, prompt_image_pairs)
        rewards, metadata = zip(*every, strict=True)
        return rewards, metadata

    # ---- advantages

    def advantages(self, images: Images, rewards: Tensor) -> Tensor:
        """Advantages `(N,)` of this process's images, from the rewards of all processes."""
        rewards = rewards.cpu().double()  # some devices have no float64
        if self.config.per_prompt_stat_tracking:
            prompts = gather_object([prompt for _, prompts, _ in images.batches for prompt in prompts])
            found = torch.as_tensor(self.stat_tracker.update(prompts, rewards.numpy()))
        else:
            found = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-8)
        return self._own(found).to(images.log_probs)

    def _own(self, values: Tensor) -> Tensor:
        """This process's part of the values of all."""
        return values.chunk(self.accelerator.num_processes)[self.accelerator.process_index]

    def reward_statistics(self, images: Images, rewards: Tensor) -> dict[str, object]:
        """What is logged of the rewards of all processes."""
        values = rewards.cpu().numpy()
        return {"reward": values, "reward_mean": float(values.mean()), "reward_std": float(values.std())}

    # ---- training

    def _train_once(self, images: Images, advantages: Tensor, epoch: int, inner_epoch: int, global_step: int) -> int:
        """One pass over the images; each trains the first of its denoising steps in an order of its own."""
        config, seeds = self.config, (self.config.seed, epoch, inner_epoch)
        order = torch.randperm(len(advantages), generator=generator_of(*seeds))
        random_steps = torch.tensor(self._random_steps)
        drawn = [
            random_steps[torch.randperm(len(random_steps), generator=generator_of(*seeds, number))]
            for number in images.numbers
        ]
        steps = torch.stack(drawn)[:, : self.num_train_timesteps]
        for rows in order.split(config.train_batch_size * config.train_gradient_accumulation_steps):
            found: list[tuple[Tensor, Tensor, Tensor]] = []
            parts = rows.split(config.train_batch_size)
            for part in parts:
                embeds = self.policy.training_embeds(tuple(each[part] for each in images.conditions))
                for at in steps[part].unbind(dim=1):
                    figures = self.calculate_loss(
                        images.latents[part, at], images.timesteps[part, at], images.latents[part, at + 1],
                        images.log_probs[part, at], advantages[part], embeds,
                    )  # fmt: skip
                    self.accelerator.backward(figures[0] / (len(parts) * steps.shape[1]))
                    found.append(tuple(figure.detach() for figure in figures))  # type: ignore[arg-type]
            self._update(global_step)
            means = map(self._mean, zip(*found, strict=True))
            values = dict(zip(("loss", "approx_kl", "clipfrac"), means, strict=True))
            values |= {"epoch": epoch, "inner_epoch": inner_epoch}
            global_step += 1
            self.log(values | self.loss_statistics(), global_step)
        return global_step

    def loss_statistics(self) -> dict[str, float]:
        """More to log of an optimiser step."""
        return {}

    def calculate_loss(
        self, latents: Tensor, timesteps: Tensor, next_latents: Tensor, log_probs: Tensor, advantages: Tensor,
        embeds: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Loss, approximate KL divergence and clipped share of one denoising step of B images, 0-dim each.

        `latents`, `next_latents` `(B, C, h, w)`; `timesteps`, `log_probs`, `advantages` `(B,)`; `embeds` has 2 B rows,
        the negative ones first, where guidance is trained, else B.
        """
        given = latents, timesteps, next_latents, embeds
        with self.autocast():
            found = self.policy.step(*given)
        limit = self.config.train_adv_clip_max
        ratio = (found.log_probs - log_probs).clamp(max=LARGEST_LOG_RATIO).exp()
        loss = self.loss(advantages.clamp(-limit, limit), self.config.train_clip_range, ratio)
        loss = loss + self.penalty(found, *given)
        approx_kl = (found.log_probs - log_probs).square().mean() / 2
        clipfrac = ((ratio - 1).abs() > self.config.train_clip_range).float().mean()
        return loss, approx_kl, clipfrac

    def penalty(self, found: DDPOSchedulerOutput, *given: object) -> Tensor | float:
        """Added to the loss of a denoising step, which the policy `found` for its arguments."""
        return 0.0

    # ---- checkpoints

    def carried(self) -> dict[str, object]:
        """The rewards remembered of each prompt."""
        return {prompt: list(known) for prompt, known in self.stat_tracker.stats.items()}

    def load_carried(self, state: dict[str, Any]) -> None:
        """Restore `carried`."""
        size = self.stat_tracker.buffer_size
        self.stat_tracker.stats = {prompt: deque(known, maxlen=size) for prompt, known in state.items()}


def check_batch_sizes(config: PolicyGradientOptions, processes: int) -> None:
    """Raise ValueError for batch sizes that do not divide, with the nearest that do."""
    sampled, trained = config.sample_batch_size, config.train_batch_size
    if sampled % trained:
        divisors = [str(size) for size in range(1, sampled + 1) if sampled % size == 0]
        raise ValueError(
            f"sample_batch_size must be a multiple of train_batch_size, got {sampled} and {trained}. Set "
            f"train_batch_size to {' or '.join(divisors)}, or sample_batch_size to "
            f"{(sampled // trained + 1) * trained}."
        )
    images = sampled * config.sample_num_batches_per_epoch * processes
    each = trained * processes * config.train_gradient_accumulation_steps
    if images % each:
        batches = config.sample_num_batches_per_epoch * sampled // trained
        fitting = [str(count) for count in range(1, batches + 1) if batches % count == 0]
        raise ValueError(
            f"the {images} images of an epoch (sample_batch_size * sample_num_batches_per_epoch * processes) must be a "
            f"multiple of the {each} of an optimiser step (train_batch_size * train_gradient_accumulation_steps * "
            f"processes). Set train_gradient_accumulation_steps to {' or '.join(fitting)}."
        )
