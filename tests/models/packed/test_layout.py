"""The two layouts of a batch hold the same tokens and score the same targets."""

import pytest
import torch

from trl.collators.preference import pack_prefix_groups
from trl.models.packed.layout import (
    count_tokens,
    packed_batch,
    padded_batch,
    padded_rows,
    scored_sequences,
)
from trl.tensors.segments import Segments

PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11], [0, 0, 12, 13]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]]),
    "labels": torch.tensor([[-100, 6, 7, -100], [8, 9, -100, 11], [-100, -100, 12, 13]]),
}
PACKED = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]]),
    "labels": torch.tensor([[-100, 6, 7, -100, 9, -100, 11, -100, 13]]),
}


def test_padding_on_either_side_is_taken_out():
    packed = packed_batch(PADDED, with_table=True)
    assert packed.inputs["input_ids"].tolist() == PACKED["input_ids"].tolist()
    assert packed.inputs["position_ids"].tolist() == PACKED["position_ids"].tolist()
    assert Segments(packed.inputs["attention_mask"]).length.tolist() == [3, 4, 2]
    assert packed.scored.target.tolist() == [6, 7, 9, 11, 13]
    assert packed.scored.source.tolist() == [0, 1, 3, 5, 7]
    assert packed.scored.sequence.tolist() == [0, 0, 1, 1, 2]
    assert packed.sequence_lengths.tolist() == [3, 3, 3, 4, 4, 4, 4, 2, 2]


def test_packed_rows_become_padded_ones():
    padded = padded_batch(PACKED, pad_token_id=0)
    assert padded.inputs["input_ids"].tolist() == [[5, 6, 7, 0], [8, 9, 10, 11], [12, 13, 0, 0]]
    assert padded.inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert padded.scored.target.tolist() == [6, 7, 9, 11, 13]
    assert padded.scored.source.tolist() == [0, 1, 4, 6, 8]
    assert padded.real_tokens.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_branches_become_rows_with_their_prompt_and_prompts_none_of_their_own():
    segments = Segments.from_prefix_groups([(2, [1, 2]), (3, []), (1, [1])])
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]),
        "labels": torch.tensor([[-100, 2, 3, 4, 5, -100, 7, 8, -100, 10]]),
        "segment_table": segments.table,
    }
    rows = padded_rows(batch, pad_token_id=0)
    assert rows["input_ids"].tolist() == [[1, 2, 3, 0], [1, 2, 4, 5], [6, 7, 8, 0], [9, 10, 0, 0]]
    assert rows["labels"].tolist() == [
        [-100, 2, 3, -100],
        [-100, -100, 4, 5],
        [-100, 7, 8, -100],
        [-100, 10, -100, -100],
    ]
    assert padded_batch(batch, pad_token_id=0).sequence_ends.tolist() == [2, 7, 10, 13]
    packed = packed_batch(batch, with_table=True)
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 2, 2, 3, 0, 1, 2, 0, 1]]
    assert packed.sequence_ends.tolist() == [2, 4, 7, 9]
    assert packed.scored.sequence.tolist() == [0, 0, 1, 1, 2, 2, 3]


def test_a_tree_is_scored_for_the_same_sequences_in_either_layout():
    batch = pack_prefix_groups([([5, 6], [[7, 8], [9]]), ([4], [[3], [2, 1, 7]])])
    packed, padded = packed_batch(batch, with_table=True).scored, padded_batch(batch, pad_token_id=0).scored
    assert padded.sequence.tolist() == packed.sequence.tolist() == batch["scored_sequence"].tolist()
    assert padded.target.tolist() == packed.target.tolist()


def test_labels_that_are_not_shifted_stand_at_their_own_positions():
    for layout in (
        packed_batch(PADDED, with_table=False, shifted=False),
        padded_batch(PADDED, pad_token_id=0, shifted=False),
    ):
        ids = layout.inputs["input_ids"].flatten()
        assert ids[layout.scored.source].tolist() == [6, 7, 8, 9, 11, 12, 13]
        assert layout.scored.target.tolist() == [6, 7, 8, 9, 11, 12, 13]
        assert layout.scored.sequence.tolist() == [0, 0, 1, 1, 1, 2, 2]
        assert ids[layout.sequence_ends].tolist() == [7, 11, 13]


def test_counts_leave_out_the_first_token_and_the_padding():
    # 8 and 12 are the first tokens of their rows: nothing predicts them.
    assert len(scored_sequences(PADDED)) == len(scored_sequences(PACKED)) == 5
    assert count_tokens(PADDED) == count_tokens(PACKED) == 9


@pytest.mark.parametrize(("positions", "message"), [([[0, 1], [0, 1]], r"\(1, N\)"), ([[3, 4]], "must start at 0")])
def test_positions_that_say_nothing_are_an_error(positions, message):
    batch = {"input_ids": torch.tensor(positions), "position_ids": torch.tensor(positions)}
    with pytest.raises(ValueError, match=message):
        packed_batch(batch, with_table=True)


def test_padding_on_the_left_moves_to_the_right_in_every_tensor_of_the_rows():
    rows = padded_batch({**PADDED, "token_type_ids": PADDED["input_ids"] + 1, "other": 3}, pad_token_id=0)
    assert rows.inputs["input_ids"].tolist() == [[5, 6, 7, 0], [8, 9, 10, 11], [12, 13, 0, 0]]
    assert rows.inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert rows.inputs["token_type_ids"][2].tolist() == [13, 14, 1, 1]
    assert rows.inputs["other"] == 3
    assert rows.scored.target.tolist() == [6, 7, 9, 11, 13]
    assert rows.scored.source.tolist() == [0, 1, 4, 6, 8]
    assert padded_rows(PADDED, pad_token_id=0)["labels"][2].tolist() == [12, 13, -100, -100]


def both_targets(batch):
    packed, rows = packed_batch(batch, with_table=False), padded_batch(batch, pad_token_id=0)
    return packed.scored.target.tolist(), rows.scored.target.tolist(), len(scored_sequences(batch))


def test_a_sequence_is_not_predicted_from_the_one_before_it():
    batch = {**PACKED, "labels": PACKED["input_ids"]}
    targets = [6, 7, 9, 10, 11, 13]
    assert both_targets(batch) == (targets, targets, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1]])}, "attention_mask"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids"),
        (
            {"attention_mask": torch.tensor([[0, 1, 1, 1]]), "position_ids": torch.arange(4)[None]},
            "position_ids",
        ),
    ],
)
@pytest.mark.parametrize(
    "to_layout", [lambda b: packed_batch(b, with_table=True), lambda b: padded_batch(b, pad_token_id=0)]
)
def test_masks_and_positions_that_contradict_each_other(to_layout, change, message):
    ids = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(ValueError, match=message):
        to_layout({"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), **change})


def test_filler_tokens_count_nowhere():
    filled = {
        "input_ids": torch.cat([PACKED["input_ids"], torch.zeros(1, 3, dtype=torch.int64)], dim=1),
        "position_ids": torch.cat([PACKED["position_ids"], torch.tensor([[0, 1, 2]])], dim=1),
        "labels": torch.cat([PACKED["labels"], torch.full((1, 3), -100)], dim=1),
        "filler": torch.tensor([3]),
    }
    assert count_tokens(filled) == 9
    packed = packed_batch(filled, with_table=True)
    assert packed.inputs["input_ids"].shape == (1, 12)
    assert "filler" not in packed.inputs
    assert packed.real_tokens.tolist() == list(range(9))
    assert packed.sequence_ends.tolist() == [2, 6, 8]
    assert padded_rows(filled, pad_token_id=0)["input_ids"].shape == (3, 4)
