"""Configuration of Nash-MD."""

from dataclasses import dataclass

from trl.options.groups import documented, option
from trl.trainer.online_dpo_config import OnlineDPOConfig, read_schedule


@documented
@dataclass
class NashMDConfig(OnlineDPOConfig):
    """Settings of `NashMDTrainer`: those of `OnlineDPOConfig` and the one below.

    Example:
        >>> from trl.trainer.nash_md_config import NashMDConfig
        >>> NashMDConfig("my-model", mixture_coef=0.25, use_cpu=True).mixture_coef
        0.25
    """

    mixture_coef: list[float] = option(
        [0.5],
        "Share of the reference in the opponent, the geometric mixture of policy (0) and reference (1): a number, or a list "
        "with one for each epoch.",
    )

    def check(self) -> None:
        super().check()
        self.mixture_coef = read_schedule("mixture_coef", self.mixture_coef, largest=1.0)  # type: ignore[assignment]
        require_pairs(self, "Nash-MD")


def require_pairs(args: OnlineDPOConfig, name: str) -> None:
    """Raise ValueError unless a prompt has two completions, the policy's and its opponent's."""
    if args.num_generations != 2:
        raise ValueError(
            f"{name} compares one completion of the policy with one of its opponent, got num_generations={args.num_generations}. Set "
            "it to 2."
        )
