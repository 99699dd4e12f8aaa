"""Methods of 0.26 that replace groups in padded tensors; training replaces them in rollouts and does not call these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trl.rollouts.padded_replay import REQUIRED, padded_batch, scored_groups, slice_group, with_groups


class PaddedReplayMethods:
    """A replay buffer of padded groups, `replay_buffer`, for programs with a loop of their own.

    Tensors have B rows, `num_generations` for each of G prompts: ids and masks `(B, P)` and `(B, T)`, prompts padded on the left;
    log-probs and importance ratios `(B, T)`; advantages `(G, num_generations)`; deviations of rewards `(G,)` or as advantages.
    """

    def slice_group_data(self: Any, data: Tensor, mask: Tensor, group_idx: int) -> tuple[Tensor, Tensor]:
        """Rows of a group and their mask, without the outer columns that none of its rows uses."""
        return slice_group(data, mask, group_idx, size=self.sizes.group)

    def update_replay_buffer(
        self: Any, groups_with_variance: Tensor, group_advantages: Tensor, group_std_rewards: Tensor, prompt_ids: Tensor,
        prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor, forward_kwargs: Mapping[str, Any],
        optional_vision_fields: list[str] | None = None, old_per_token_logps: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None, importance_sampling_ratio: Tensor | float | None = None,
    ) -> None:  # fmt: skip
        """Add the groups where `groups_with_variance (G,)` is true, with the named fields of `forward_kwargs`."""
        batch = padded_batch(
            (prompt_ids, prompt_mask, completion_ids, completion_mask, group_advantages),
            (old_per_token_logps, ref_per_token_logps, importance_sampling_ratio),
            {name: forward_kwargs[name] for name in optional_vision_fields or ()},
        )
        chosen, size = groups_with_variance.bool(), self.sizes.group
        self.replay_buffer.add(*scored_groups(batch, chosen, std_rewards=group_std_rewards, size=size))

    def sample_from_replay_buffer(
        self: Any,
        num_samples: int,
        optional_vision_fields: list[str] | None = None,
        optional_tensor_fields: list[str] | None = None,
    ) -> list[dict[str, Tensor]]:
        """Groups drawn with replacement in proportion to their scores, with the named fields; none of an empty buffer."""
        names = {*REQUIRED, *(optional_vision_fields or ()), *(optional_tensor_fields or ())}
        found = self.replay_buffer.sample(num_samples)
        if missing := {name for group in found for name in names - group.keys()}:
            raise ValueError(
                f"groups of the replay buffer have no {', '.join(sorted(missing))}. Add every group with the same fields."
            )
        return [{name: value for name, value in group.items() if name in names} for group in found]

    def update_with_replay_buffer(
        self: Any, group_advantages: Tensor, group_std_rewards: Tensor, prompt_ids: Tensor, prompt_mask: Tensor,
        completion_ids: Tensor, completion_mask: Tensor, forward_kwargs: Mapping[str, Any], num_items_in_batch: int,
        old_per_token_logps: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        importance_sampling_ratio: Tensor | float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Replace the groups without a deviation by groups drawn from the buffer, then add the other groups to the buffer.

        Returns the tensors by name, advantages as `(B,)`, and `num_items_in_batch` with the change in the number of completion
        tokens of these rows. An empty buffer leaves the batch as it is.
        """
        columns = prompt_ids, prompt_mask, completion_ids, completion_mask
        optional = old_per_token_logps, ref_per_token_logps, importance_sampling_ratio
        batch, size = padded_batch((*columns, group_advantages), optional, forward_kwargs), self.sizes.group
        varied = (group_std_rewards.reshape(len(prompt_ids) // size, -1) > 0).any(dim=1)
        places = (~varied).nonzero()[:, 0].tolist()
        groups = self.sample_from_replay_buffer(len(places), None, list(batch)) if places else []
        replaced = dict(zip(places, groups, strict=False))  # an empty buffer gives none
        found = with_groups(batch, replaced, size=size, pad_token_id=self.pad_token_id)
        self.update_replay_buffer(
            varied, group_advantages, group_std_rewards, *columns, forward_kwargs, list(forward_kwargs), *optional
        )  # fmt: skip
        added = int(found["completion_mask"].sum()) - int(completion_mask.sum())
        return {**found, "num_items_in_batch": num_items_in_batch + added}
