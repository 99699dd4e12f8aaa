"""Pairs as prompts for an encoder and completions for a decoder."""

import pytest

from trl.collators.seq2seq import seq2seq_batch

ROWS = [
    {"prompt_input_ids": [5, 6, 1], "chosen_input_ids": [7, 0, 1], "rejected_input_ids": [8, 1]},
    {"prompt_input_ids": [9, 1], "chosen_input_ids": [1], "rejected_input_ids": [3, 4, 5, 1]},
]


def test_pairs_alternate_and_masks_go_by_position():
    batch = seq2seq_batch(ROWS, pad_token_id=1)
    assert batch["input_ids"].tolist() == [[5, 6, 1], [9, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["decoder_prompt"].tolist() == [0, 0, 1, 1]
    assert batch["decoder_labels"].tolist() == [
        [7, 0, 1, -100],
        [8, 1, -100, -100],
        [1, -100, -100, -100],
        [3, 4, 5, 1],
    ]


def test_other_completions():
    rows = [{"prompt_input_ids": [5], "completion_input_ids": [7, 1]}]
    batch = seq2seq_batch(rows, completions=["completion_input_ids"])
    assert batch["decoder_labels"].tolist() == [[7, 1]]
    assert batch["decoder_prompt"].tolist() == [0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least 1 row"),
        ([ROWS[0], {**ROWS[1], "rejected_input_ids": []}], "row 1 .* no tokens in 'rejected_input_ids'"),
        ([{"prompt_input_ids": [1], "chosen_input_ids": [1]}], "row 0 .* has no 'rejected_input_ids'"),
        ([{**ROWS[0], "prompt_input_ids": []}], "'prompt_input_ids'"),
    ],
)
def test_missing_tokens_are_named(rows, message):
    with pytest.raises(ValueError, match=message):
        seq2seq_batch(rows)
