import pytest
import torch

from trl.tensors.padding import (
    flush_left,
    flush_right,
    pad,
    pad_to_length,
    shuffle_sequence_dict,
    split_tensor_dict,
)


def test_pad_sides_and_multiples():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64)]
    assert pad(rows, padding_value=9).tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]]
    assert pad(rows, padding_side="left").tolist() == [[1, 2, 3], [0, 0, 4], [0, 0, 0]]
    assert pad(rows[:2], pad_to_multiple_of=4).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert pad(rows[:2], padding_side="left", pad_to_multiple_of=2).tolist() == [[0, 1, 2, 3], [0, 0, 0, 4]]
    assert pad([torch.zeros(4)], pad_to_multiple_of=4).shape == (1, 4)


def test_pad_matrices_keeps_dtype_and_pads_further_dimensions_on_the_right():
    rows = [
        torch.tensor([[1.5, 2.5]], dtype=torch.float64),
        torch.tensor([[3.5], [4.5]], dtype=torch.float64),
    ]
    padded = pad(rows, padding_value=-1, padding_side="left")
    assert padded.dtype == torch.float64
    assert padded.tolist() == [[[-1, -1], [1.5, 2.5]], [[3.5, -1], [4.5, -1]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([torch.zeros(1)], 0, "middle"), "padding_side must be 'left' or 'right', got 'middle'"),
        (([],), r"one or more of the same rank, got ranks \[\]"),
        (([torch.zeros(1), torch.zeros(1, 1)],), r"same rank, got ranks \[1, 2\]"),
    ],
)
def test_pad_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        pad(*arguments)


def test_pad_to_length_in_any_dimension():
    tensor = torch.tensor([[1, 2], [3, 4]])
    assert pad_to_length(tensor, 3, 7).tolist() == [[1, 2, 7], [3, 4, 7]]
    assert pad_to_length(tensor, 3, 7, dim=0).tolist() == [[1, 2], [3, 4], [7, 7]]
    assert pad_to_length(tensor, 1, 7) is tensor


MASK = torch.tensor([[0, 0, 1, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
IDS = torch.arange(1, 22).view(3, 7) * MASK


def test_flush_left_by_hand():
    mask, ids = flush_left(MASK, IDS)
    assert mask.tolist() == [[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert ids.tolist() == [[3, 4, 0, 6], [9, 10, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(flush_left(MASK), mask)


def test_flush_right_by_hand():
    mask, ids = flush_right(MASK, IDS)
    assert mask.tolist() == [[1, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert ids.tolist() == [[3, 4, 0, 6], [0, 0, 9, 10], [0, 0, 0, 0]]


def test_flush_keeps_dtypes_a_column_that_only_one_row_uses_and_empty_masks():
    mask, floats = flush_left(torch.tensor([[False, True, False, True], [True, False, False, False]]), torch.ones(2, 4))
    assert mask.dtype == torch.bool and mask.tolist() == [[True, False, True], [True, False, False]]
    assert floats.shape == (2, 3)
    assert flush_left(torch.zeros(2, 3)).shape == (2, 0)
    assert flush_right(torch.zeros(2, 0)).shape == (2, 0)


def test_split_tensor_dict():
    parts = split_tensor_dict({"x": torch.arange(6).view(6, 1), "none": None, "scalar": torch.tensor(2.0)}, 3)
    assert [part["x"].flatten().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(part["none"] is None and part["scalar"] == 2.0 for part in parts)
    with pytest.raises(ValueError, match="rows of 'x' over num_chunks: 6 is not a multiple of 4"):
        split_tensor_dict({"x": torch.arange(6)}, 4)


def test_shuffle_keeps_rows_together():
    columns = {
        "x": torch.arange(10),
        "y": [str(i) for i in range(10)],
        "none": None,
        "m": torch.arange(10).view(10, 1),
    }
    shuffled = shuffle_sequence_dict(columns)
    assert [str(i) for i in shuffled["x"].tolist()] == shuffled["y"]
    assert shuffled["m"].flatten().tolist() == shuffled["x"].tolist()
    assert sorted(shuffled["x"].tolist()) == list(range(10)) and shuffled["x"].tolist() != list(range(10))
    assert shuffled["none"] is None and isinstance(shuffled["y"], list)
    with pytest.raises(ValueError, match=r"one length, got \{'x': 2, 'y': 1\}"):
        shuffle_sequence_dict({"x": [1, 2], "y": [1]})
