"""Prompts that are trained with their chosen completions: every layout labels and counts the same tokens."""

import pytest
import torch
from tests.trainer.dpo_runs import pairs

from trl.collators.preference import PairCollator, with_prompts_scored
from trl.models.packed.layout import padded_rows, scored_sequences


def test_a_prefix_group_scores_the_prompt_in_front_of_the_chosen_branch():
    rows = [
        {"prompt_input_ids": [4, 5, 6], "chosen_input_ids": [7], "rejected_input_ids": [8, 9]},
        {"prompt_input_ids": [3], "chosen_input_ids": [2], "rejected_input_ids": [1]},
    ]
    found = with_prompts_scored(PairCollator()(rows))
    assert found["labels"].tolist() == [[-100, 5, 6, 7, 8, 9, -100, 2, 1]]
    assert found["scored_source"].tolist() == [0, 1, 2, 2, 4, 6, 6]
    assert found["scored_target"].tolist() == [5, 6, 7, 8, 9, 2, 1]
    assert found["scored_sequence"].tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert found["prompt_tokens"].tolist() == [2, 0]
    apart = {
        "prompt_input_ids": [4, 5],
        "rejected_prompt_input_ids": [5],
        "chosen_input_ids": [7],
        "rejected_input_ids": [8],
    }
    found = with_prompts_scored(PairCollator()([apart]))
    assert found["scored_target"].tolist() == [5, 7, 8] and found["prompt_tokens"].tolist() == [1]


@pytest.mark.parametrize("prefix_sharing", [True, False])
def test_rows_cut_from_a_packed_row_are_labelled_alike(prefix_sharing):
    batch = PairCollator(prefix_sharing=prefix_sharing)(pairs())
    found = with_prompts_scored(batch)
    rows = with_prompts_scored(padded_rows(batch, pad_token_id=0))
    again = padded_rows(found, pad_token_id=0)
    scored = (rows["labels"] != -100)[:, 1:]
    assert torch.equal(again["labels"][:, 1:][scored], rows["labels"][:, 1:][scored])
    assert torch.equal(found["prompt_tokens"], rows["prompt_tokens"])
    counts = [torch.bincount(scored_sequences(each)) for each in (found, rows, again)]
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(counts[0], counts[2])


def test_rows_padded_on_the_left_and_rows_without_labels():
    batch = {
        "input_ids": torch.tensor([[0, 4, 5, 6], [0, 4, 5, 7], [3, 4, 9, 0], [3, 5, 0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]),
        "labels": torch.tensor([[-100, -100, -100, 6], [-100, -100, -100, 7], [-100, 4, -100, -100], [-100, 5, -100, -100]]),
    }  # fmt: skip
    found = with_prompts_scored(batch)
    assert found["prompt_tokens"].tolist() == [1, 0]
    assert found["labels"].tolist() == [
        [-100, 4, 5, 6], [-100, -100, -100, 7], [3, 4, -100, -100], [-100, 5, -100, -100],
    ]  # fmt: skip


def test_filler_behind_a_packed_row_is_no_prompt():
    batch = PairCollator(prefix_sharing=False)(pairs()[:1])
    tail = torch.arange(3)[None]
    batch = {
        **batch,
        "input_ids": torch.cat([batch["input_ids"], torch.zeros_like(tail)], dim=1),
        "position_ids": torch.cat([batch["position_ids"], tail], dim=1),
        "labels": torch.cat([batch["labels"], torch.full_like(tail, -100)], dim=1),
        "filler": torch.tensor([3]),
    }
    found = with_prompts_scored(batch)
    assert found["labels"][0, -3:].tolist() == [-100] * 3
    assert found["prompt_tokens"].tolist() == [3]
