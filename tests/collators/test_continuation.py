"""The row of second completions, and which tokens of the first row come in front of it."""

import torch

from trl.collators.continuation import behind_prompts
from trl.collators.preference import completion_batch
from trl.collators.unpaired import single_completions
from trl.tensors.segments import Segments

ROWS = [([5, 6, 7], [[8], [9, 10]]), ([11], [[12, 13], [14]]), ([15, 16], [[17], [18]])]


def test_a_row_behind_the_first_completions():
    trees = completion_batch(ROWS, prefix_sharing=True)
    kept, row = behind_prompts(trees)
    first = single_completions(trees, 0, of=2)["input_ids"][0]
    assert first[kept].tolist() == [5, 6, 15]  # all but each prompt's last token
    assert row["input_ids"].tolist() == [[7, 9, 10, 11, 14, 16, 18]]
    assert row["labels"].tolist() == [[-100, 9, 10, -100, 14, -100, 18]]
    segments = Segments.from_table(row["segment_table"])
    assert segments.position_ids()[0, 3:].tolist() == [2, 3, 4, 0, 1, 1, 2]
    assert list(segments) == [(0, 2, 0, 0), (2, 1, 0, 0), (3, 3, 0, 2), (6, 2, 0, 0), (8, 2, 2, 1)]


def test_other_layouts_have_none():
    assert behind_prompts(completion_batch(ROWS, prefix_sharing=False)) is None
    alone = [(prompt, [completion]) for prompt, completions in ROWS for completion in completions]
    assert behind_prompts(completion_batch(alone, prefix_sharing=True)) is None
    three = completion_batch([([5], [[6], [7], [8]])], prefix_sharing=True)
    assert behind_prompts(three) is None
    assert behind_prompts({"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)}) is None
