import numpy as np
import pytest
import torch

from trl.collators.language_modelling import DataCollatorForLanguageModeling

ROWS = [
    {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]},
    {"input_ids": [8, 9], "completion_mask": [0, 1]},
]


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, list]:
    assert all(value.dtype == torch.int64 for value in batch.values())
    return {name: value.tolist() for name, value in batch.items()}


def test_padded_by_hand():
    assert as_lists(DataCollatorForLanguageModeling(pad_token_id=0)(ROWS)) == {
        "input_ids": [[5, 6, 7], [8, 9, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[-100, 6, 7], [-100, 9, -100]],
    }


def test_lists_of_ids_and_torch_call():
    """As transformers' collators: a subclass that overrides `torch_call` is called."""

    class Counting(DataCollatorForLanguageModeling):
        calls = 0

        def torch_call(self, examples):
            self.calls += 1
            return super().torch_call(examples)

    collate = Counting(pad_token_id=0)
    expected = {
        "input_ids": [[5, 6, 7], [8, 9, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[5, 6, 7], [8, 9, -100]],
    }
    assert as_lists(collate([[5, 6, 7], torch.tensor([8, 9])])) == expected
    assert as_lists(collate.torch_call([[5, 6, 7], {"input_ids": [8, 9]}])) == expected
    assert collate.calls == 2


def test_padding_free_by_hand():
    assert as_lists(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(ROWS)) == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "labels": [[-100, 6, 7, -100, 9]],
    }


def test_all_masks_must_allow_a_token():
    rows = [{"input_ids": [1, 2, 3, 4], "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}]
    assert DataCollatorForLanguageModeling(0)(rows)["labels"].tolist() == [[-100, 2, -100, 4]]
    everything = DataCollatorForLanguageModeling(0, completion_only_loss=False)
    assert everything(rows)["labels"].tolist() == [[1, 2, -100, 4]]


def test_labels_of_the_data_set_are_used_and_not_changed():
    rows = [{"input_ids": [1, 2, 3], "labels": torch.tensor([-100, 9, 3]), "completion_mask": [1, 1, 0]}]
    assert DataCollatorForLanguageModeling(0)(rows)["labels"].tolist() == [[-100, 9, -100]]
    assert rows[0]["labels"].tolist() == [-100, 9, 3]


def test_pad_may_be_a_real_token():
    batch = DataCollatorForLanguageModeling(pad_token_id=2)([{"input_ids": [5, 2, 2]}, {"input_ids": [2]}])
    assert batch["labels"].tolist() == [[5, 2, 2], [2, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_packed_rows_are_packed_with_restarting_positions():
    rows = [{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]}, {"input_ids": [6, 7]}]
    assert as_lists(DataCollatorForLanguageModeling(0)(rows)) == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1]],
        "labels": [[-100, 2, 3, -100, 5, -100, 7]],
    }


def test_multiples():
    collate = DataCollatorForLanguageModeling(0, padding_free=True, pad_to_multiple_of=4)
    assert as_lists(collate([{"input_ids": [1, 2, 3, 4]}, {"input_ids": [6]}])) == {
        "input_ids": [[1, 2, 3, 4, 6, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 0, 0, 1, 2]],
        "labels": [[-100, 2, 3, 4, -100, -100, -100, -100]],
        "filler": [3],
    }
    assert collate([{"input_ids": [1, 2, 3, 4]}])["position_ids"].tolist() == [[0, 1, 2, 3]]
    padded = DataCollatorForLanguageModeling(0, pad_to_multiple_of=4)(ROWS)
    assert {value.shape for value in padded.values()} == {(2, 4)}


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.int32)])
@pytest.mark.parametrize("padding_free", [False, True])
def test_lists_arrays_and_tensors(make, padding_free: bool):
    rows = [{name: make(value) for name, value in row.items()} for row in ROWS]
    collate = DataCollatorForLanguageModeling(0, padding_free=padding_free)
    assert as_lists(collate(rows)) == as_lists(collate(ROWS))


def test_other_columns_are_left_out_and_hidden_tokens_removed():
    rows = [{"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "text": "x", "labels": [7, 7, 5, 9]}]
    assert as_lists(DataCollatorForLanguageModeling(0)(rows)) == {
        "input_ids": [[5, 6]],
        "attention_mask": [[1, 1]],
        "labels": [[5, 9]],
    }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least 1 row"),
        ([{"text": "x"}], "row 0 of the batch must have 'input_ids'"),
        ([{"input_ids": [1]}, {"text": "x"}], "row 1 of the batch has no 'input_ids'"),
        (
            [{"input_ids": [1], "completion_mask": [1]}, {"input_ids": [1]}],
            "row 1 of the batch has no 'completion_mask'",
        ),
        (
            [{"input_ids": [1, 2], "completion_mask": [1]}],
            "'completion_mask' has 1 items",
        ),
        ([{"input_ids": [1, 2], "labels": [1]}], "'labels' has 1 items"),
        ([{"input_ids": [1, 2], "seq_lengths": [1]}], "seq_lengths add up to 1, but there are 2"),
    ],
)
def test_rows_that_are_no_batch(rows, message: str):
    with pytest.raises(ValueError, match=message):
        DataCollatorForLanguageModeling(0)(rows)


def test_wrong_options():
    with pytest.raises(ValueError, match="pad_to_multiple_of must be"):
        DataCollatorForLanguageModeling(0, pad_to_multiple_of=0)
    with pytest.raises(ValueError, match="return_tensors must be 'pt', got 'np'"):
        DataCollatorForLanguageModeling(0, return_tensors="np")
