"""Configuration of XPO."""

from dataclasses import dataclass

from trl.options.groups import documented, option
from trl.trainer.nash_md_config import require_pairs
from trl.trainer.online_dpo_config import OnlineDPOConfig, read_schedule


@documented
@dataclass
class XPOConfig(OnlineDPOConfig):
    """Settings of `XPOTrainer`: those of `OnlineDPOConfig` and the one below.

    Example:
        >>> from trl.trainer.xpo_config import XPOConfig
        >>> XPOConfig("my-model", alpha=[1e-4, 1e-5], use_cpu=True).alpha
        [0.0001, 1e-05]
    """

    alpha: list[float] = option(
        [1e-5],
        "Optimism: weight of the policy's log-probability of the reference's completions, which is lowered. A number, or a "
        "list with one for each epoch.",
    )

    def check(self) -> None:
        super().check()
        self.alpha = read_schedule("alpha", self.alpha)  # type: ignore[assignment]
        require_pairs(self, "XPO")
