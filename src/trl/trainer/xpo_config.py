"""Configuration of XPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trl.options.groups import documented, option
from trl.trainer.online_dpo_config import OnlineDPOConfig


@documented
@dataclass
class XPOConfig(OnlineDPOConfig):
    """Settings of `XPOTrainer`: those of `OnlineDPOConfig` and the one below.

    Example:
        >>> from trl.trainer.xpo_config import XPOConfig
        >>> XPOConfig("my-model", alpha=[1e-4, 1e-5], use_cpu=True).alpha
        [0.0001, 1e-05]
    """

    has_opponent: ClassVar[bool] = True
    schedules: ClassVar[Mapping[str, float]] = {**OnlineDPOConfig.schedules, "alpha": float("inf")}
    alpha: list[float] = option(
        [1e-5], "Optimism: weight of the log-prob of the reference's completions, which is lowered; also one per epoch."
    )
