"""Configuration of group filtered policy optimisation."""

from dataclasses import dataclass, replace

from trl.options.groups import documented, option
from trl.rollouts.schedule import RolloutSizes, kept_sizes
from trl.trainer.grpo_config import GRPOConfig


@documented
@dataclass
class GFPOConfig(GRPOConfig):
    """Settings of `GFPOTrainer`: those of `GRPOConfig` and the one below.

    Sizes count generated completions: a micro-batch is learned from `num_remains_in_group / num_generations` of its
    rows.

    Example:
        >>> from trl.experimental.gfpo import GFPOConfig
        >>> args = GFPOConfig("my-model", num_generations=8, num_remains_in_group=4, use_cpu=True)
        >>> args.kept_sizes().rows, args.generation_batch_size
        (4, 8)
    """

    num_remains_in_group: int | None = option(
        None,
        "Completions of each prompt that are learned from, those that group_filter_func scores highest; less than "
        "num_generations. None: all, as GRPO.",
        ">= 2",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_remains_in_group is not None:
            self.kept_sizes()

    def check(self) -> None:
        super().check()
        generated = self.num_generations or 0
        if self.num_remains_in_group is not None and self.num_remains_in_group >= generated:
            raise ValueError(
                f"num_remains_in_group={self.num_remains_in_group} must be less than num_generations={generated}: "
                "nothing would be filtered. Generate more (the paper: 8, 16 or 24, of which 8 remain), or leave it "
                "out."
            )

    def kept_sizes(self) -> RolloutSizes:
        """The sizes of what remains of a rollout batch, and of its optimiser steps.

        Raises: ValueError where it does not divide.
        """
        assert self.num_generations is not None
        sizes = replace(self.rollout_sizes(), group=self.num_generations)
        return sizes if self.num_remains_in_group is None else kept_sizes(sizes, self.num_remains_in_group)
