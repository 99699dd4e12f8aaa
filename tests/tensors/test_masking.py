import torch

from trl.tensors.padding import first_true_indices, truncate_response, truncate_right


def test_first_true_indices():
    bools = torch.tensor([[[True, False], [False, True]], [[False, False], [True, True]]])
    assert first_true_indices(bools).tolist() == [[0, 1], [2, 0]]
    assert first_true_indices(bools, dtype=torch.int32).dtype == torch.int32
    assert first_true_indices(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


def test_truncation_keeps_the_stop_token_even_where_it_is_the_pad_token():
    ids = torch.tensor([[5, 0, 7, 0], [0, 1, 2, 3], [1, 2, 3, 4]])
    kept, mask = truncate_right(ids, stop_token_id=0, pad_token_id=0)
    assert kept.tolist() == [[5, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert mask.dtype == ids.dtype
    assert truncate_response(0, 9, ids).tolist() == [[5, 0, 9, 9], [0, 9, 9, 9], [1, 2, 3, 4]]
