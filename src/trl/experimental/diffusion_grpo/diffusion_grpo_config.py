"""Configuration of GRPO for diffusion models."""

from dataclasses import dataclass

from trl.objectives.group_advantages import Scale
from trl.options.diffusion import DiffusionOptions
from trl.options.groups import documented, option, same
from trl.options.methods import RewardPolicy
from trl.trainer.ddpo_config import PolicyGradientOptions


@documented
@dataclass
class DiffusionGRPOConfig(PolicyGradientOptions, RewardPolicy):
    """Configuration of `DiffusionGRPOTrainer`.

    `sample_batch_size` must be a multiple of `num_generations` and of `train_batch_size`.

    Example:
        >>> from trl.experimental.diffusion_grpo import DiffusionGRPOConfig
        >>> config = DiffusionGRPOConfig(sample_batch_size=16, num_generations=8, beta=0.01, mixed_precision="no")
        >>> config.sample_num_steps
        10
    """

    sample_num_steps: int = same(DiffusionOptions, "sample_num_steps", 10)
    sample_batch_size: int = same(PolicyGradientOptions, "sample_batch_size", 8)
    num_generations: int = option(8, "Images of each prompt, which are compared.", ">= 2")
    beta: float = option(0.0, "Weight of the KL divergence from the model before training, per denoising step.")
    scale_rewards: Scale = option("group", "Deviation that divides advantages: of the group, of the batch, or none.")

    def check(self) -> None:
        """Raise on bad values."""
        super().check()
        if self.sample_batch_size % self.num_generations:
            fitting = (self.sample_batch_size // self.num_generations + 1) * self.num_generations
            raise ValueError(
                f"sample_batch_size must be a multiple of num_generations, got {self.sample_batch_size} and "
                f"{self.num_generations}. Set sample_batch_size to {fitting}, or change num_generations."
            )
