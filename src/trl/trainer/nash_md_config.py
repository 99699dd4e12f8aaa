"""Configuration of Nash-MD."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trl.options.groups import documented, option
from trl.trainer.online_dpo_config import OnlineDPOConfig


@documented
@dataclass
class NashMDConfig(OnlineDPOConfig):
    """Settings of `NashMDTrainer`: those of `OnlineDPOConfig` and the one below.

    Example:
        >>> from trl.trainer.nash_md_config import NashMDConfig
        >>> NashMDConfig("my-model", mixture_coef=0.25, use_cpu=True).mixture_coef
        0.25
    """

    has_opponent: ClassVar[bool] = True
    schedules: ClassVar[Mapping[str, float]] = {**OnlineDPOConfig.schedules, "mixture_coef": 1.0}
    mixture_coef: list[float] = option(
        [0.5],
        "Share of the reference in the opponent, the geometric mixture of policy (0) and reference (1): a number, or a "
        "list with one for each epoch.",
    )
