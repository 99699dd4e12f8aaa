import pytest
import torch

from trl.tensors.padding import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

BATCH = {
    "pixel_values": torch.arange(18.0).view(9, 2),
    "image_grid_thw": torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 3]]),
    "ids": torch.arange(3),
}


def test_one_image_per_row_and_back():
    split = split_pixel_values_by_grid(BATCH)
    assert [len(x) for x in split["pixel_values"]] == [2, 4, 3]
    assert split["image_grid_thw"][1].tolist() == [[1, 2, 2]]
    joined = unsplit_pixel_values_by_grid(split)
    assert joined.keys() == BATCH.keys() and all(torch.equal(joined[key], BATCH[key]) for key in BATCH)


@pytest.mark.parametrize("counts", [[2, 0, 1], torch.tensor([2, 0, 1])])
def test_several_images_in_a_row_and_none(counts):
    split = split_pixel_values_by_grid({**BATCH, "num_images": counts})
    assert [len(x) for x in split["pixel_values"]] == [6, 0, 3]
    assert [len(x) for x in split["image_grid_thw"]] == [2, 0, 1]


def test_counts_that_do_not_add_up():
    with pytest.raises(ValueError, match="image_grid_thw"):
        split_pixel_values_by_grid({**BATCH, "pixel_values": BATCH["pixel_values"][:8]})
    with pytest.raises(ValueError, match="image_grid_thw"):
        split_pixel_values_by_grid({**BATCH, "num_images": [1, 1]})
