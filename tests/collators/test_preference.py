"""Pairs as one packed row, and batches of other collators read as the same pairs."""

import pytest
import torch

from trl.collators.preference import DPODataCollatorWithPadding, PairCollator, as_pair_batch, seq2seq_batch

ROWS = [
    {"prompt_input_ids": [5, 6], "chosen_input_ids": [7, 8, 9], "rejected_input_ids": [10]},
    {"prompt_input_ids": [11], "chosen_input_ids": [12], "rejected_input_ids": [13, 14]},
]
SHARED = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
REPEATED = [5, 6, 7, 8, 9, 5, 6, 10, 11, 12, 11, 13, 14]
REFERENCE = {"ref_chosen_logps": 0.5, "ref_rejected_logps": -1.5}


def whole(row, gaps=False):
    """Sequences with labels that are -100 on the prompt, and on one token of the answer."""
    found = {}
    for side in ("chosen", "rejected"):
        prompt, completion = row["prompt_input_ids"], row[f"{side}_input_ids"]
        labels = [-100] * len(prompt) + completion
        if gaps and len(completion) == 3:
            labels[-2] = -100
        found |= {f"{side}_input_ids": prompt + completion, f"{side}_labels": labels}
    return found


def test_a_prompt_stands_once_unless_the_two_differ():
    batch = PairCollator()(ROWS)
    assert batch["input_ids"].tolist() == [SHARED] and batch["rows"].tolist() == [0, 1]
    assert batch["scored_source"].tolist() == [1, 2, 3, 1, 6, 6, 8]
    assert batch["scored_sequence"].tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert "ref_logps" not in batch
    own = [{**ROWS[0], **REFERENCE, "rejected_prompt_input_ids": [6]}, {**ROWS[1], **REFERENCE}]
    batch = PairCollator()(own)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 6, 10, 11, 12, 13, 14]]
    assert batch["rows"].tolist() == [0, 1] and batch["ref_logps"].tolist() == [0.5, -1.5] * 2
    assert PairCollator(prefix_sharing=False)(ROWS)["input_ids"].tolist() == [REPEATED]


@pytest.mark.parametrize(
    "rows", [ROWS, [whole(row) for row in ROWS], [whole(row, gaps=True) for row in ROWS]], ids=["columns", "whole", "gaps"]
)  # fmt: skip
def test_batches_of_other_collators_hold_the_same_pairs(rows):
    batch = DPODataCollatorWithPadding(pad_token_id=5)([{**row, **REFERENCE} for row in rows])
    for sharing in (True, False):
        found, expected = (
            as_pair_batch(batch, prefix_sharing=sharing),
            PairCollator(prefix_sharing=sharing)(ROWS),
        )
        assert found.pop("ref_logps").tolist() == [0.5, -1.5] * 2
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    ready = {"labels": torch.ones(1, 2)}
    assert as_pair_batch(ready, prefix_sharing=True) is ready


def test_one_prompt_that_differs_is_repeated_for_all():
    rows = [whole(ROWS[0]), {**whole(ROWS[1]), "rejected_input_ids": [4, 13, 14]}]
    found = as_pair_batch(DPODataCollatorWithPadding()(rows), prefix_sharing=True)
    assert found["input_ids"].tolist() == [[*REPEATED[:10], 4, 13, 14]]
    assert found["rows"].tolist() == [0, 1]


def test_each_column_is_padded_by_itself():
    batch = DPODataCollatorWithPadding(pad_token_id=3, label_pad_token_id=-1)(
        [{"prompt_input_ids": [5, 6], "chosen_input_ids": [7], "chosen_labels": [7, 8], "x_attention_mask": [1], "note": "a", **REFERENCE},
         {"prompt_input_ids": [9], "chosen_input_ids": [1, 2], "chosen_labels": [7], "x_attention_mask": [1, 1], "note": "b", **REFERENCE}]
    )  # fmt: skip
    assert batch["prompt_input_ids"].tolist() == [[5, 6], [3, 9]]
    assert batch["prompt_attention_mask"].tolist() == [[1, 1], [0, 1]]
    assert batch["chosen_input_ids"].tolist() == [[7, 3], [1, 2]]
    assert batch["chosen_attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["chosen_labels"].tolist() == [[7, 8], [7, -1]]
    assert batch["x_attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert "chosen_labels_attention_mask" not in batch
    own = DPODataCollatorWithPadding()([{"x_attention_mask": [0, 1], "x_input_ids": [4, 5]}])
    assert own["x_attention_mask"].tolist() == [[0, 1]]
    assert batch["ref_chosen_logps"].tolist() == [0.5, 0.5] and batch["note"] == ["a", "b"]


def test_batches_that_hold_no_pairs():
    with pytest.raises(ValueError, match="rejected_input_ids"):
        as_pair_batch({"prompt_input_ids": torch.ones(1, 2), "chosen_input_ids": torch.ones(1, 2)}, prefix_sharing=True)
    for row in ({**ROWS[0], "prompt_input_ids": []}, {**ROWS[0], "rejected_input_ids": []}):
        with pytest.raises(ValueError, match="row 0"):
            PairCollator()([row])


# ---- encoder-decoders

ENCODED = [
    {"prompt_input_ids": [5, 6, 1], "chosen_input_ids": [7, 0, 1], "rejected_input_ids": [8, 1]},
    {"prompt_input_ids": [9, 1], "chosen_input_ids": [1], "rejected_input_ids": [3, 4, 5, 1]},
]


def test_completions_of_an_encoder_decoder_follow_one_another_and_masks_go_by_position():
    batch = PairCollator(encoder_pad=1)(ENCODED)
    assert batch["rows"].tolist() == [0, 1]
    assert batch["input_ids"].tolist() == [[5, 6, 1], [9, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["decoder_prompt"].tolist() == [0, 0, 1, 1]
    assert batch["decoder_labels"].tolist() == [
        [7, 0, 1, -100], [8, 1, -100, -100], [1, -100, -100, -100], [3, 4, 5, 1],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least 1 row"),
        (
            [ENCODED[0], {**ENCODED[1], "rejected_input_ids": []}],
            r"row 1 of the batch has sequences of \[2, 1, 0\] tokens",
        ),
        ([{**ENCODED[0], "prompt_input_ids": []}], "row 0 of the batch"),
    ],
)
def test_missing_tokens_of_an_encoder_decoder_are_named(rows, message):
    with pytest.raises(ValueError, match=message):
        seq2seq_batch(rows)
