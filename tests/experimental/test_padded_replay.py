"""The methods of 0.26 that replace groups in padded tensors: what they give, by hand, and that overrides are refused."""

import inspect

import pytest
import torch

from tests.experimental import group_runs
from tests.trainer import grpo_runs
from trl.experimental.grpo_with_replay_buffer import GRPOWithReplayBufferTrainer
from trl.rollouts.padded_replay import with_groups

PAD = 0  # the tokenizer's
NAMES = ("slice_group_data", "update_replay_buffer", "sample_from_replay_buffer", "update_with_replay_buffer")


@pytest.fixture
def trainer():
    return group_runs.make("replay", num_generations=2, num_generations_eval=2, replay_buffer_size=2)[0]


def batch(**changes):
    """Two prompts of two completions: rewards of the first group differ, those of the second do not."""
    return {
        "group_advantages": torch.tensor([[1.0, -1.0], [0.0, 0.0]]),
        "group_std_rewards": torch.tensor([0.5, 0.0]),
        "prompt_ids": torch.tensor([[PAD, 11, 12], [PAD, 11, 12], [21, 22, 23], [21, 22, 23]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[31, 32, PAD], [33, PAD, PAD], [41, 42, 43], [44, PAD, PAD]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]),
        "forward_kwargs": {},
        **changes,
    }


def earlier(width, **changes):
    """One group with a deviation: a prompt of a token, completions of `width` tokens and of one."""
    ids = torch.full((2, width), 7)
    ids[1, 1:] = PAD
    return {
        "group_advantages": torch.tensor([[0.5, -0.5]]),
        "group_std_rewards": torch.tensor([[2.0, 2.0]]),  # as 0.26 gives it: once for each completion
        "prompt_ids": torch.tensor([[6], [6]]),
        "prompt_mask": torch.tensor([[1], [1]]),
        "completion_ids": ids,
        "completion_mask": (ids != PAD).long(),
        "forward_kwargs": {},
        **changes,
    }


def test_slice_group_data(trainer):
    own = batch()
    ids, mask = trainer.slice_group_data(own["prompt_ids"], own["prompt_mask"], 0)
    assert ids.tolist() == [[11, 12], [11, 12]] and mask.tolist() == [[1, 1], [1, 1]]
    ids, mask = trainer.slice_group_data(own["completion_ids"], own["completion_mask"], 0)
    assert ids.tolist() == [[31, 32], [33, PAD]] and mask.tolist() == [[1, 1], [1, 0]]
    ids, _ = trainer.slice_group_data(own["completion_ids"], own["completion_mask"], 1)
    assert ids.tolist() == [[41, 42, 43], [44, PAD, PAD]]
    ids, _ = trainer.slice_group_data(own["completion_ids"], torch.zeros(4, 3), 1)  # nothing is trained
    assert ids.shape == (2, 0)


def test_update_replay_buffer(trainer):
    """Scores: |1| * 0.5 + |-1| * 0.5 = 1 and |0.5| * 2 + |-0.5| * 2 = 2."""
    own = batch(old_per_token_logps=-torch.arange(12.0).view(4, 3))
    trainer.update_replay_buffer(torch.tensor([True, False]), **own)
    trainer.update_replay_buffer(torch.tensor([True]), **earlier(2))
    assert [score for score, _ in trainer.replay_buffer.heap] == [2.0, 1.0]
    kept = trainer.replay_buffer.heap[1][1]
    assert kept["prompt_ids"].tolist() == [[11, 12], [11, 12]]
    assert kept["completion_mask"].tolist() == [[1, 1], [1, 0]]
    assert kept["old_per_token_logps"].tolist() == [[0, -1], [-3, -4]]
    assert kept["advantages"].tolist() == [1, -1]
    own["completion_ids"].zero_()
    assert kept["completion_ids"].tolist() == [[31, 32], [33, PAD]]  # a copy


def test_sample_from_replay_buffer(trainer):
    assert trainer.sample_from_replay_buffer(3) == []
    logps = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    images = {"pixel_values": torch.ones(2, 3, 4, 4)}
    given = earlier(2, old_per_token_logps=logps, forward_kwargs=images)
    trainer.update_replay_buffer(torch.tensor([True]), **given, optional_vision_fields=["pixel_values"])
    required = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}
    drawn = trainer.sample_from_replay_buffer(3)
    assert len(drawn) == 3 and all(group.keys() == required for group in drawn)
    (group,) = trainer.sample_from_replay_buffer(1, ["pixel_values"], ["old_per_token_logps"])
    assert group["pixel_values"].shape == (2, 3, 4, 4) and torch.equal(group["old_per_token_logps"], logps)
    with pytest.raises(
        ValueError, match=r"have no ref_per_token_logps\. Add every group with the same fields"
    ):
        trainer.sample_from_replay_buffer(1, optional_tensor_fields=["ref_per_token_logps"])


def test_a_shorter_group_is_padded(trainer):
    """The earlier group has prompts of 1 token (of 3) and completions of 2 (of 3)."""
    logps = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    trainer.update_replay_buffer(torch.tensor([True]), **earlier(2, old_per_token_logps=logps))
    own = batch(old_per_token_logps=torch.full((4, 3), -9.0), importance_sampling_ratio=None)
    found = trainer.update_with_replay_buffer(**own, num_items_in_batch=7)
    assert found["prompt_ids"].tolist() == [[PAD, 11, 12], [PAD, 11, 12], [PAD, PAD, 6], [PAD, PAD, 6]]
    assert found["prompt_mask"].tolist() == [[0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert found["completion_ids"].tolist() == [[31, 32, PAD], [33, PAD, PAD], [7, 7, PAD], [7, PAD, PAD]]
    assert found["completion_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert found["old_per_token_logps"].tolist() == [
        [-9.0] * 3,
        [-9.0] * 3,
        [-1.0, -2.0, 0.0],
        [-3.0, 0.0, 0.0],
    ]
    assert found["advantages"].tolist() == [1.0, -1.0, 0.5, -0.5]
    assert found["num_items_in_batch"] == 6  # 3 tokens in the place of 4
    assert [score for score, _ in trainer.replay_buffer.heap] == [2.0, 1.0]  # the batch's own group was added


def test_a_longer_group_widens_the_batch(trainer):
    trainer.update_replay_buffer(torch.tensor([True]), **earlier(5), importance_sampling_ratio=0.5)
    found = trainer.update_with_replay_buffer(**batch(), num_items_in_batch=7, importance_sampling_ratio=2.0)
    assert found["completion_ids"].tolist() == [
        [31, 32, PAD, PAD, PAD], [33, PAD, PAD, PAD, PAD], [7, 7, 7, 7, 7], [7, PAD, PAD, PAD, PAD]
    ]  # fmt: skip
    assert found["completion_mask"].sum(1).tolist() == [2, 1, 5, 1] and found["num_items_in_batch"] == 9
    assert found["importance_sampling_ratio"].tolist() == [[2.0], [2.0], [0.5], [0.5]]


def test_ids_are_padded_with_the_padding_token():
    own = {name: value for name, value in batch().items() if name in ("prompt_ids", "completion_ids")}
    group = {"prompt_ids": torch.tensor([[6], [6]]), "completion_ids": torch.tensor([[7, 8], [7, 8]])}
    found = with_groups(own, {1: group}, size=2, pad_token_id=99)
    assert found["prompt_ids"][2:].tolist() == [[99, 99, 6]] * 2
    assert found["completion_ids"][2:].tolist() == [[7, 8, 99]] * 2


def test_an_empty_buffer_leaves_the_batch_unchanged(trainer):
    own = batch()
    found = trainer.update_with_replay_buffer(**own, num_items_in_batch=7)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        assert torch.equal(found[name], own[name])
    assert found["advantages"].tolist() == [1, -1, 0, 0] and found["num_items_in_batch"] == 7
    assert len(trainer.replay_buffer.heap) == 1


def test_groups_with_a_deviation_stay(trainer):
    trainer.update_replay_buffer(torch.tensor([True]), **earlier(2))
    own = batch(group_std_rewards=torch.tensor([0.5, 0.25]), group_advantages=torch.full((2, 2), 0.1))
    found = trainer.update_with_replay_buffer(**own, num_items_in_batch=7)
    assert torch.equal(found["completion_ids"], own["completion_ids"])
    assert [score for score, _ in trainer.replay_buffer.heap] == pytest.approx(
        [2.0, 0.1]
    )  # 0.05 does not fit


def test_patches_of_all_rows_in_one_tensor_are_refused(trainer):
    with pytest.raises(
        ValueError, match=r"forward_kwargs holds pixel_values, .* one entry for each of the 4"
    ):
        trainer.update_with_replay_buffer(
            **batch(forward_kwargs={"pixel_values": torch.ones(9, 3)}), num_items_in_batch=7
        )


@pytest.mark.parametrize("name", NAMES)
def test_overrides_are_refused(name, monkeypatch):
    """Training does not call these methods, unless the subclass overrides the method that may call them."""
    kind = type("Mine", (GRPOWithReplayBufferTrainer,), {name: lambda self, *args, **kwargs: None})
    config = grpo_runs.TRAINERS["replay"][0]
    monkeypatch.setitem(grpo_runs.TRAINERS, "mine", (config, kind))
    with pytest.raises(
        TypeError, match=f"Mine overrides {name}, which training does not call. Override make_window"
    ):
        group_runs.make("mine")
    kind.make_window = lambda self, number: None
    group_runs.make("mine")


def test_recorded_parameters():
    recorded = {
        "slice_group_data": "data mask group_idx",
        "sample_from_replay_buffer": "num_samples optional_vision_fields optional_tensor_fields",
        "update_replay_buffer": "groups_with_variance group_advantages group_std_rewards prompt_ids prompt_mask completion_ids "
        "completion_mask forward_kwargs optional_vision_fields old_per_token_logps ref_per_token_logps importance_sampling_ratio",
        "update_with_replay_buffer": "group_advantages group_std_rewards prompt_ids prompt_mask completion_ids completion_mask "
        "forward_kwargs num_items_in_batch old_per_token_logps ref_per_token_logps importance_sampling_ratio",
    }  # fmt: skip
    for name, parameters in recorded.items():
        found = inspect.signature(getattr(GRPOWithReplayBufferTrainer, name)).parameters
        assert list(found)[1:] == parameters.split()
