"""GFPO: more completions of each prompt are generated, and the best of them by a second measure learned from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import TrainerCallback

from trl.experimental.gfpo.gfpo_config import GFPOConfig
from trl.legacy.interface import View
from trl.methods.grpo import GRPOMethod
from trl.models.peft import AdapterConfig
from trl.objectives.group_advantages import best_of_groups
from trl.options.training import config_or_default
from trl.reporting.model_card import Paper
from trl.rewards.functions import accepted, name_of, parameters_of
from trl.rewards.result import RewardInputs
from trl.rewards.source import ProcessingClasses, RewardFunc
from trl.rollouts.experience import FILTERED, LENGTH, SCORES, Experience
from trl.rollouts.schedule import RolloutSizes
from trl.tensors.reduce import Weighted, weighted
from trl.trainer.arguments import AnyDataset, AnyModel, EvalDatasets, Optimizers, Processor
from trl.trainer.grpo_trainer import GRPOTrainer

Item = TypeVar("Item")
GroupFilterFunc = Callable[..., Sequence[Sequence[float]]]
"""`func(group_completions=, group_rewards=, **columns)`: for every group a list of one score per completion."""


class GFPOMethod(GRPOMethod):
    """GRPO on the best completions of each group by a second measure; `group_filter` None keeps all."""

    group_filter: GroupFilterFunc | None = None
    kept: int = 0  # completions of each group

    def apply_rewards(
        self, experience: Experience, scores: Tensor, inputs: RewardInputs, *, training: bool
    ) -> Experience:
        """With the column `filtered` in training."""
        experience = super().apply_rewards(experience, scores, inputs, training=training)
        if self.group_filter is None or not training:
            return experience
        size = self.args.num_generations
        assert size is not None
        worths = filter_scores(self.group_filter, inputs, experience.per_row[SCORES], size)
        return experience.with_rows(**{FILTERED: ~best_of_groups(worths, size, self.kept)})

    def lacks_variance(self, rows: Mapping[str, Tensor], group_size: int) -> Tensor:
        """Groups of which those that remain have equal rewards."""
        return super().lacks_variance({SCORES: _kept_scores(rows)}, group_size)

    def rewards_and_advantages(self, rows: Mapping[str, Tensor], group_size: int) -> tuple[Tensor, Tensor]:
        """The rewards of all, and advantages among those that remain."""
        _, advantages = super().rewards_and_advantages({SCORES: _kept_scores(rows)}, group_size)
        return rows[SCORES], advantages

    def mean_length(self, rows: Mapping[str, Tensor]) -> Tensor:
        return rows[LENGTH][_remains(rows)].mean()

    def metrics(self, rows: Mapping[str, Tensor], sources: Sequence[str], group_size: int) -> dict[str, Weighted]:
        metrics = super().metrics(rows, sources, group_size)
        if FILTERED in rows:
            remains = _remains(rows)
            metrics["remaining/mean_length"] = weighted(rows[LENGTH], remains)
            metrics["remaining/reward"] = weighted(rows[SCORES], remains & ~rows[SCORES].isnan())
        return metrics


class GFPOTrainer(GRPOTrainer):
    """Trainer of group filtered policy optimisation (Shrivastava et al. 2025, arXiv:2508.09726).

    Takes what `GRPOTrainer` takes, and `group_filter_func(group_completions=, group_rewards=, **columns)`, which
    returns a list of scores for every group. The `num_remains_in_group` highest of each group are the group that is
    learned from: their advantages are over their own mean and deviation. Filtered completions only count in the
    statistics of rewards and lengths.

    Example:
        >>> def shortest(group_completions, **columns):
        ...     return [[-len(text) for text in group] for group in group_completions]
        >>> args = GFPOConfig("brief", num_generations=8, num_remains_in_group=4, use_cpu=True)
        >>> trainer = GFPOTrainer("Qwen/Qwen3-0.6B", reward, args, rows, group_filter_func=shortest)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "gfpo"]
    _name: ClassVar[str] = "GFPO"
    _paper = Paper("Sample More to Think Less: Group Filtered Policy Optimization for Concise Reasoning", "2508.09726")
    args: GFPOConfig
    method_type = GFPOMethod
    config_type = GFPOConfig
    method: GFPOMethod
    group_filter_func = View("method.group_filter")

    def __init__(
        self, model: AnyModel, reward_funcs: RewardFunc | Sequence[RewardFunc], args: GFPOConfig | None = None,
        train_dataset: AnyDataset | None = None, eval_dataset: EvalDatasets | None = None,
        processing_class: Processor | None = None,
        reward_processing_classes: ProcessingClasses = None, group_filter_func: GroupFilterFunc | None = None,
        callbacks: list[TrainerCallback] | None = None, optimizers: Optimizers = (None, None),
        peft_config: AdapterConfig = None, **more: Any,
    ) -> None:  # fmt: skip
        args = config_or_default(args, GFPOConfig, "gfpo")
        if (group_filter_func is None) != (args.num_remains_in_group is None):
            raise ValueError(
                f"group_filter_func={group_filter_func!r} and num_remains_in_group={args.num_remains_in_group}, "
                "expected both or neither. Set num_remains_in_group in GFPOConfig and pass the function that scores "
                "completions."
            )
        if group_filter_func is not None and not callable(group_filter_func):
            raise TypeError(
                f"group_filter_func is a {type(group_filter_func).__name__}, expected a function. Pass one that "
                "answers with a list of scores for every group."
            )
        self._kept_sizes = args.kept_sizes()
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes,
            callbacks, optimizers, peft_config, **more,
        )  # fmt: skip
        self.method.group_filter, self.method.kept = group_filter_func, self._kept_sizes.group

    def rows_of_step(self, step: int, sizes: RolloutSizes | None = None) -> list[Tensor]:
        """Rows that remain."""
        rows = super().rows_of_step(step, sizes or self._kept_sizes)
        assert self._learned is not None
        if FILTERED not in self._learned.per_row:
            return rows
        remain = (~self._learned.per_row[FILTERED]).nonzero()[:, 0]
        return [remain[local_rows] for local_rows in rows]


def _remains(rows: Mapping[str, Tensor]) -> Tensor:
    """Which rows were not filtered out, bool `(N,)`."""
    return rows[FILTERED] == 0 if FILTERED in rows else torch.ones_like(rows[SCORES], dtype=torch.bool)


def _kept_scores(rows: Mapping[str, Tensor]) -> Tensor:
    return torch.where(_remains(rows), rows[SCORES], torch.nan)


def filter_scores(function: GroupFilterFunc, inputs: RewardInputs, rewards: Tensor, group_size: int) -> Tensor:
    """The scores of the completions of whole groups, float64 `(B,)`.

    The function is given lists of groups, each a list of `group_size`: `group_completions`, `group_rewards` (None
    without a reward), `prompts`, `completion_ids` and the columns; of these, without `**kwargs`, the ones that it
    names.

    Raises: ValueError or TypeError for another shape, and for scores that are not finite.
    """
    worth = [None if value != value else value for value in rewards.tolist()]
    every: dict[str, object] = {
        "group_completions": _groups(inputs.completions, group_size),
        "group_rewards": _groups(worth, group_size),
        "prompts": _groups(inputs.prompts, group_size),
        "completion_ids": _groups(inputs.completion_ids, group_size),
        "trainer_state": inputs.trainer_state,
        **{name: _groups(values, group_size) for name, values in inputs.columns.items()},
    }
    answer, name = function(**accepted(every, parameters_of(function))), name_of(function)
    groups = len(inputs) // group_size
    wanted = f"expected a list of {group_size} finite scores for each of {groups} groups"
    try:
        lists = [[float(score) for score in group] for group in answer]
    except TypeError as error:
        raise TypeError(f"group_filter_func {name!r} returned no lists of numbers ({error}), {wanted}.") from None
    if [len(group) for group in lists] != [group_size] * groups:
        raise ValueError(f"group_filter_func {name!r} returned {len(lists)} groups of other sizes, {wanted}.")
    scores = torch.tensor(lists, dtype=torch.float64).flatten()
    if not scores.isfinite().all():
        raise ValueError(
            f"group_filter_func {name!r} returned {float(scores[~scores.isfinite()][0])}, {wanted}. Give a completion "
            "that must not remain a large negative score."
        )
    return scores


def _groups(values: Sequence[Item], group_size: int) -> list[list[Item]]:
    return [list(values[first : first + group_size]) for first in range(0, len(values), group_size)]
