"""Configuration of MiniLLM."""

from dataclasses import dataclass
from typing import ClassVar

from trl.options.checks import warn_unread
from trl.options.groups import documented, option, same
from trl.options.shared import shared
from trl.trainer.grpo_config import GRPOConfig


@documented
@dataclass
class MiniLLMConfig(GRPOConfig):
    """Settings of `MiniLLMTrainer`: those of `GRPOConfig` and the ones below.

    Example:
        >>> from trl.experimental.minillm import MiniLLMConfig
        >>> args = MiniLLMConfig("my-model", num_generations=1, gamma=1.0, use_cpu=True)
        >>> args.scale_rewards, args.single_step_decomposition
        ('none', True)
    """

    least_generations: ClassVar[int] = 1
    disable_dropout: bool = shared("disable_dropout")
    teacher_kl_coef: float = same(GRPOConfig, "teacher_kl_coef", 1.0, help="Weight of both parts beside the rewards.")
    rkl_advantage: bool = option(True, "Add log-ratios of teacher and student to the advantages (the long-term part).")
    single_step_decomposition: bool = option(
        True,
        "Add the exact reverse KL divergence at each token to the loss; advantages then begin at the next token. "
        "Costs a second forward and backward pass.",
    )
    kd_temperature: float = option(1.0, "Temperature of both distributions in the divergence.", "> 0")
    gamma: float = option(0.0, "Discount of later tokens' log-ratios in an advantage; 1 in the paper.", "[0, 1]")
    length_normalization: bool = option(True, "Divide the discounted sum of log-ratios by the sum of its discounts.")

    def check(self) -> None:
        if self.num_generations == 1:
            self.scale_rewards = "none"
        super().check()
        if not self.rkl_advantage:
            warn_unread(self, {"gamma", "length_normalization"}, "with rkl_advantage=False. Leave it out")
