"""GRPO that replaces groups with equal rewards by good groups of earlier batches."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_config import GRPOWithReplayBufferConfig
from trl.legacy.interface import LegacyReplay
from trl.methods.grpo import GRPOMethod
from trl.methods.method import Step
from trl.objectives.group_advantages import group_moments, has_no_variance
from trl.rollouts.experience import MEAN_LENGTH, OLD, REPLAYED, SCORES, Experience, concatenate
from trl.rollouts.measures import sampled_lengths
from trl.rollouts.replay import GroupBuffer
from trl.rollouts.replay import ReplayBuffer as ReplayBuffer
from trl.rollouts.schedule import replayed_groups, rows_of_groups
from trl.tensors.reduce import Weighted
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.loaders import order_seed


class ReplayMethod(GRPOMethod):
    """GRPO whose ratios of replayed groups are to the policy that sampled them."""

    def needs_old(self, experience: Experience) -> bool:
        return True  # a group may be replayed much later

    def old_logps(self, experience: Experience, step: Step) -> Tensor | None:
        replays = REPLAYED in experience.per_row and bool(experience.per_row[REPLAYED].any())
        return experience.per_token[OLD] if replays else super().old_logps(experience, step)


class GRPOWithReplayBufferTrainer(LegacyReplay, GRPOTrainer):
    """`GRPOTrainer` with a buffer of earlier groups, which replace new groups with equal rewards.

    A group whose rewards are all equal is replaced by one drawn from the buffer, with the log-probs, rewards and
    advantages of its own time: the ratio to the policy that sampled it is clipped as in later steps on one batch. The
    buffer holds the `replay_buffer_size` groups with the largest sum of mean and deviation of the rewards that were
    learned from before. It is part of every checkpoint, and the same on all processes.

    Example:
        >>> args = GRPOWithReplayBufferConfig("runs", replay_buffer_size=32, use_cpu=True)
        >>> trainer = GRPOWithReplayBufferTrainer("Qwen/Qwen3-0.6B", reward, args, dataset)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo-with-replay-buffer"]
    _name: ClassVar[str] = "GRPO with replay buffer"
    args: GRPOWithReplayBufferConfig
    method_type = ReplayMethod
    config_type = GRPOWithReplayBufferConfig

    def begin_rollouts(self, *parts: Any, **settings: Any) -> None:
        """With an empty buffer."""
        super().begin_rollouts(*parts, **settings)
        self.buffer = GroupBuffer(self.args.replay_buffer_size, self.sizes.group)
        self.replay_buffer = ReplayBuffer(self.args.replay_buffer_size)

    def make_rollout_batch(self, number: int) -> Experience:
        """A rollout batch whose groups with equal rewards are replaced by earlier ones; metrics are of the new ones."""
        if number == 0:
            self.buffer.clear()  # of an earlier run
        batch = super().make_rollout_batch(number)
        batch = batch.with_rows(**{REPLAYED: torch.zeros(len(batch), dtype=torch.bool)})
        if not self.buffer.size:
            return batch
        every, size = batch, self.sizes.group
        if self.args.world_size > 1:
            every = concatenate([Experience.from_state(state) for state in gather_object([batch.state()])])
        is_flat = has_no_variance(every.per_row[SCORES], size)
        missing, groups = is_flat.nonzero()[: len(self.buffer), 0], (~is_flat).nonzero()[:, 0]
        if len(missing):
            batch = self._replaced(every, missing, number)
        rewards = group_moments(every.per_row[SCORES], size)
        scores = (rewards.mean + rewards.std)[groups * size]
        self.buffer.add(every.take(rows_of_groups(groups, size)), scores)
        share = torch.tensor(1 / self.args.world_size, dtype=torch.float64)
        replaced = len(missing) * size / self.sizes.rows
        measured = {"replaced_groups": replaced, "buffer_groups": len(self.buffer)}
        self._sums["train"].add({f"replay/{name}": Weighted(value * share, share) for name, value in measured.items()})
        return batch

    def _replaced(self, every: Experience, missing: Tensor, number: int) -> Experience:
        """This process's rows of the rollout batch, with earlier groups in the place of those that are `missing`."""
        drawn = replayed_groups(number, len(missing), among=len(self.buffer), seed=order_seed(self.args))
        earlier = self.buffer.rows(drawn)
        earlier = earlier.with_rows(**{REPLAYED: torch.ones(len(earlier), dtype=torch.bool)})
        source = torch.arange(len(every))
        source[rows_of_groups(missing, self.sizes.group)] = len(every) + torch.arange(len(earlier))
        first = self.args.process_index * self.sizes.own_rows
        rows = concatenate([every, earlier]).take(source)
        share = sampled_lengths(rows).double().mean().to(rows.per_row[MEAN_LENGTH].dtype)
        rows = rows.with_rows(**{MEAN_LENGTH: share.expand(len(rows)).clone()})
        return rows.take(torch.arange(first, first + self.sizes.own_rows))

    def save_progress(self, folder: Path) -> None:
        """Write into a checkpoint also the buffer."""
        super().save_progress(folder)
        if self.args.process_index == 0:
            self.buffer.save(str(folder))

    def load_progress(self, folder: Path) -> None:
        """Load what `save_progress` wrote, when training begins."""
        super().load_progress(folder)
        self.buffer.load(str(folder))
