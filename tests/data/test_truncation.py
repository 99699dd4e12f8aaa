import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, LargeList, List, Value

from trl.data.packing import pack_dataset
from trl.data.ragged import truncate_dataset, truncate_rows

ROWS = {
    "input_ids": [[1, 2, 3, 4], [5], [6, 7]],
    "completion_mask": [[0, 0, 1, 1], [1], [0, 1]],
    "weights": [[0.5, 0.25, 0.0, 1.0], [1.0], [0.0, 2.0]],
    "text": ["long text", "b", "c"],
    "words": [["a", "b", "c"], ["d"], []],
    "messages": [[{"role": "user", "content": "x"}] * 3] * 3,
    "boxes": [[[1, 2, 3], [4, 5, 6], [7]], [[1]], [[2]]],
}


def expected(max_length: int) -> dict[str, list]:
    tokens = ("input_ids", "completion_mask", "weights")
    return {name: [row[:max_length] for row in rows] if name in tokens else rows for name, rows in ROWS.items()}


@pytest.mark.parametrize("max_length", [1, 3, 10])
def test_token_columns_and_nothing_else(max_length: int):
    rows = Dataset.from_dict(ROWS)
    cut = truncate_dataset(rows, max_length)
    assert cut[:] == expected(max_length)
    assert cut.features == rows.features


@pytest.mark.parametrize("max_length", [1, 3, 10])
def test_streaming(max_length: int):
    cut = truncate_dataset(Dataset.from_dict(ROWS).to_iterable_dataset(), max_length)
    assert Dataset.from_list(list(cut))[:] == expected(max_length)


@pytest.mark.parametrize("kind", [LargeList(Value("int64")), List(Value("int32")), List(Value("bool"))])
def test_list_types_survive(kind):
    rows = Dataset.from_dict({"ids": [[1, 0, 1], [1]]}, features=Features({"ids": kind}))
    cut = truncate_dataset(rows, 2)
    assert cut.features == rows.features
    assert cut["ids"][:] == [[1, 0], [1]]


def test_lists_of_a_fixed_size():
    rows = Dataset.from_dict({"ids": [[1, 2, 3]] * 3}, features=Features({"ids": List(Value("int64"), length=3)}))
    assert truncate_dataset(rows, 2)["ids"][:] == [[1, 2]] * 3
    assert truncate_dataset(rows, 5, {"batch_size": 2})["ids"][:] == [[1, 2, 3]] * 3


def test_formats_splits_and_streams_of_a_generator():
    rows = Dataset.from_dict(ROWS)
    cut = truncate_dataset(DatasetDict({"train": rows, "test": rows.select([2, 0])}), 1)
    assert cut["test"]["input_ids"][:] == [[6], [1]]
    assert len(truncate_dataset(rows.select([]), 1)) == 0
    torch_rows = rows.with_format("torch", columns=["input_ids"])
    assert truncate_dataset(torch_rows, 2).format == torch_rows.format
    source = IterableDataset.from_generator(lambda: ({"input_ids": ids} for ids in ROWS["input_ids"]))
    cut = truncate_dataset(source.with_format("numpy"), 2)
    assert [row["input_ids"].tolist() for row in cut] == [[1, 2], [5], [6, 7]]
    with pytest.raises(ValueError, match="max_length must be"):
        truncate_dataset(rows, 0)


def test_rows_of_a_stream_without_features_need_not_be_alike():
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2))
    rows = [
        {"input_ids": [1, 2, 3], "image": image, "words": ["a", "b", "c"], "meta": {"a": 1}},
        {"input_ids": torch.tensor([4, 5, 6]), "mask": np.array([True, False, True]), "meta": {"b": "x"}},
        {"input_ids": [7], "image": None},
    ]
    first, second, third = truncate_rows(IterableDataset.from_generator(lambda: iter(rows)), 2, keep_end=True)
    assert first == {**rows[0], "input_ids": [2, 3]} and first["image"] is image
    assert second["input_ids"].tolist() == [5, 6] and second["mask"].tolist() == [False, True]
    assert second["meta"] == {"b": "x"} and third == rows[2]
    packed = IterableDataset.from_generator(lambda: iter([{"input_ids": [1, 2], "seq_lengths": [2]}]))
    with pytest.raises(ValueError, match="a packed row has 2 tokens"):
        list(truncate_dataset(packed, 1))


def test_missing_rows_are_named():
    with pytest.raises(ValueError, match=r"column 'ids', row 1 .*None"):
        truncate_dataset(Dataset.from_dict({"ids": [[1, 2, 3], None]}), 2)


def test_images_are_not_touched():
    pytest.importorskip("PIL")
    pixels = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    features = Features({"input_ids": List(Value("int64")), "image": Image()})
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]], "image": [pixels]}, features=features)
    cut = truncate_dataset(rows, 2)
    assert cut.features == features
    assert np.array_equal(np.asarray(cut[0]["image"]), pixels)


def test_packed_rows_are_not_cut_through():
    packed = pack_dataset(Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]}), 4)
    assert truncate_dataset(packed, 4)[:] == packed[:]
    with pytest.raises(ValueError, match="a packed row has 4 tokens, more than max_length 3"):
        truncate_dataset(packed, 3)
    with pytest.raises(ValueError, match="Truncate before packing"):
        list(truncate_dataset(packed.to_iterable_dataset(), 3))
