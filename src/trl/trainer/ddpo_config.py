"""Configuration of DDPO."""

from dataclasses import dataclass

from trl.options.diffusion import DiffusionOptions
from trl.options.groups import documented, option


@dataclass
class PolicyGradientOptions(DiffusionOptions):
    """How trajectories are sampled and how often their steps are trained on."""

    sample_batch_size: int = option(1, "Images that a process samples at once.", ">= 1")
    sample_num_batches_per_epoch: int = option(2, "Batches that a process samples in an epoch.", ">= 1")
    train_num_inner_epochs: int = option(1, "Passes over the images of an epoch.", ">= 1")
    train_cfg: bool = option(True, "Train the guided model. False: sample with guidance, train the model without it.")
    train_adv_clip_max: float = option(5.0, "Largest size of an advantage.", "> 0")
    train_clip_range: float = option(
        1e-4, "Clip range of the ratio of a step's probabilities, which are means over the latent's elements.", "> 0"
    )
    train_timestep_fraction: float = option(1.0, "Share of an image's denoising steps that is trained on.", "(0, 1]")
    async_reward_computation: bool = option(
        False, "Compute the rewards of a batch on other threads while the next batches are sampled."
    )
    max_workers: int = option(2, "Threads of async_reward_computation; 1 if rewards sample images.", ">= 1")


@documented
@dataclass
class DDPOConfig(PolicyGradientOptions):
    """Configuration of `DDPOTrainer`.

    `sample_batch_size` must be a multiple of `train_batch_size`, and the images of an epoch over all processes a
    multiple of `train_batch_size * processes * train_gradient_accumulation_steps`.

    Example:
        >>> config = DDPOConfig(sample_batch_size=4, train_batch_size=2, mixed_precision="no")
        >>> config.to_dict()["train_clip_range"]
        0.0001
    """

    per_prompt_stat_tracking: bool = option(
        False, "Normalise rewards by those remembered of their prompt, not by the batch."
    )
    per_prompt_stat_tracking_buffer_size: int = option(16, "Rewards remembered of a prompt.", ">= 1")
    per_prompt_stat_tracking_min_count: int = option(
        16, "With fewer remembered rewards, a prompt's are normalised by the batch.", ">= 1"
    )
