"""Configuration of AlignProp."""

from dataclasses import dataclass

from trl.options.diffusion import DiffusionOptions
from trl.options.groups import documented, option, same


@documented
@dataclass
class AlignPropConfig(DiffusionOptions):
    """Configuration of `AlignPropTrainer`.

    Example:
        >>> config = AlignPropConfig(sample_num_steps=10, truncated_rand_backprop_minmax=(0, 9), mixed_precision="no")
        >>> config.train_learning_rate
        0.001
    """

    train_learning_rate: float = same(DiffusionOptions, "train_learning_rate", 1e-3)
    log_image_freq: int = option(1, "Call the image hook after each optimiser step that is a multiple of this.", ">= 1")
    negative_prompts: str | None = same(DiffusionOptions, "negative_prompts", None)
    truncated_backprop_rand: bool = option(True, "Draw the step from which gradients flow, once per trajectory.")
    truncated_backprop_timestep: int = option(
        49, "Without truncated_backprop_rand: the first step (0 is the noisiest) with a gradient.", ">= 0"
    )
    truncated_rand_backprop_minmax: list[int] = option(
        lambda: (0, 50), "Bounds of the draw, both included; steps after the last are drawn as the last."
    )

    def check(self) -> None:
        """Raise on bad values."""
        super().check()
        bounds, last = self.truncated_rand_backprop_minmax, self.sample_num_steps - 1
        rand, is_pair = self.truncated_backprop_rand, isinstance(bounds, (list, tuple)) and len(bounds) == 2
        if not is_pair or not 0 <= bounds[0] <= bounds[1] or (rand and bounds[0] > last):
            raise ValueError(
                f"truncated_rand_backprop_minmax must be two steps from 0 to {last}, the lower first, got {bounds}."
            )
        self.truncated_rand_backprop_minmax = tuple(bounds)  # type: ignore[assignment]
        if not rand and self.truncated_backprop_timestep > last:
            raise ValueError(
                f"truncated_backprop_timestep must be at most sample_num_steps - 1 = {last}, else nothing has a "
                f"gradient, got {self.truncated_backprop_timestep}."
            )
