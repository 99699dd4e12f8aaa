import logging

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, Features, LargeList, List, Value

from trl.data.packing import best_fit_decreasing, pack_dataset, pack_table


def random_rows(count: int, seed: int, longest: int = 40) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    ids = [[row * 1000 + place for place in range(length)] for row, length in enumerate(lengths)]
    masks = [rng.integers(0, 2, length).tolist() for length in lengths]
    return {"input_ids": ids, "completion_mask": masks}


def split_again(dataset, column: str) -> list[list[int]]:
    sequences = []
    for values, lengths in zip(dataset[column], dataset["seq_lengths"], strict=True):
        ends = np.cumsum(lengths).tolist()
        sequences += [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        assert ends[-1] == len(values)
    return sequences


def test_bfd_by_hand():
    rows = Dataset.from_dict(
        {"input_ids": [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]], "labels": [[1] * 3, [2], [3] * 2, [4] * 4]}
    )
    packed = pack_dataset(rows, 5)
    assert packed[:] == {
        "input_ids": [[7, 8, 9, 10, 4], [1, 2, 3, 5, 6]],
        "labels": [[4, 4, 4, 4, 2], [1, 1, 1, 3, 3]],
        "seq_lengths": [[4, 1], [3, 2]],
    }


def test_best_fit_takes_the_tightest_bin_and_the_longest_waiting_of_equal_ones():
    bins = best_fit_decreasing(np.array([6, 7, 6, 3, 4]), capacity=10)
    members = [bins.rows[start:end].tolist() for start, end in zip(bins.offsets, bins.offsets[1:], strict=False)]
    assert members == [[1, 3], [0, 4], [2]]


def test_wrapped_by_hand():
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6, 7]], "labels": [[1, 1, 1], [2], [3, 3, 3]]})
    packed = pack_dataset(rows, 3, "wrapped")
    assert packed[:] == {"input_ids": [[1, 2, 3], [4, 5, 6], [7]], "labels": [[1, 1, 1], [2, 3, 3], [3]]}


@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_is_intact_and_none_is_lost(seed: int):
    rows = random_rows(300, seed)
    packed = pack_dataset(Dataset.from_dict(rows), 64)
    assert max(map(len, packed["input_ids"])) <= 64
    ids, masks = split_again(packed, "input_ids"), split_again(packed, "completion_mask")
    before = sorted(zip(rows["input_ids"], rows["completion_mask"], strict=True))
    assert sorted(zip(ids, masks, strict=True)) == before
    for lengths in packed["seq_lengths"]:
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("seed", range(3))
def test_bins_are_those_of_a_plain_search(seed: int):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 3000, 200)
    spaces: list[int] = []
    since: list[int] = []
    expected: list[list[int]] = []
    for place, row in enumerate(np.argsort(-lengths, kind="stable")):
        fits = [b for b, space in enumerate(spaces) if space >= lengths[row]]
        if fits:
            chosen = min(fits, key=lambda b: (spaces[b], since[b]))
            expected[chosen].append(int(row))
            spaces[chosen] -= lengths[row]
            since[chosen] = place
        else:
            expected.append([int(row)])
            spaces.append(3000 - lengths[row])
            since.append(place)
    bins = best_fit_decreasing(lengths, 3000)
    assert np.array_equal(bins.rows, np.concatenate(expected))
    assert np.diff(bins.offsets).tolist() == [len(members) for members in expected]


def realistic_table(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.3, 0.8, rows).astype(int), 1, 2048)
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    ids = rng.integers(0, 150_000, lengths.sum())
    return pa.table(
        {
            "input_ids": pa.ListArray.from_arrays(offsets, pa.array(ids)),
            "completion_mask": pa.ListArray.from_arrays(offsets, pa.array(ids % 2)),
        }
    )


def test_wrong_arguments_and_several_splits():
    rows = Dataset.from_dict(random_rows(20, 4))
    with pytest.raises(ValueError, match="seq_length"):
        pack_dataset(rows, 0)
    with pytest.raises(ValueError, match="got 'ffd'"):
        pack_dataset(rows, 8, "ffd")
    packed = pack_dataset(DatasetDict({"train": rows.with_format("numpy")}), 64)
    assert isinstance(packed["train"][0]["input_ids"], np.ndarray)
    assert np.concatenate(packed["train"]["input_ids"]).size == sum(map(len, rows["input_ids"]))


def test_fill_of_a_realistic_distribution():
    table = realistic_table(5000)
    tokens = len(table["input_ids"].combine_chunks().values)
    assert tokens / (2048 * len(pack_table(table, 2048, "bfd"))) >= 0.99


def test_the_same_rows_give_the_same_packing():
    rows = Dataset.from_dict(random_rows(200, 3))
    once, again = pack_dataset(rows, 64), pack_dataset(rows, 64, map_kwargs={"num_proc": 2})
    assert once[:] == again[:]


def test_long_rows_are_cut_and_empty_rows_left_out(caplog):
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4, 5, 6], [], [7]]})
    with caplog.at_level(logging.WARNING, logger="trl.data.packing"):
        packed = pack_dataset(rows, 4)
    assert packed[:] == {"input_ids": [[1, 2, 3, 4], [7]], "seq_lengths": [[4], [1]]}
    assert "1 rows without tokens" in caplog.text


def test_chunked_and_sliced_tables_pack_like_whole_ones():
    whole = Dataset.from_dict(random_rows(60, 2)).data.table.combine_chunks()
    pieces = pa.concat_tables([whole.slice(0, 13), whole.slice(13, 1), whole.slice(14)])
    assert pieces["input_ids"].num_chunks > 1
    for strategy in ("bfd", "wrapped"):
        assert pack_table(pieces, 64, strategy).equals(pack_table(whole, 64, strategy))
        part = pack_table(whole.slice(20, 15), 64, strategy)
        assert part.to_pydict() == pack_table(pa.table(whole.slice(20, 15).to_pydict()), 64, strategy).to_pydict()


@pytest.mark.parametrize(
    "kind", [List(Value("int32")), LargeList(Value("int64")), List(Value("uint8")), List(Value("bool"))]
)
def test_list_types_survive(kind):
    features = Features({"input_ids": List(Value("int64")), "mask": kind})
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3]], "mask": [[1, 0], [1]]}, features=features)
    packed = pack_dataset(rows, 3)
    assert packed.features["mask"] == kind
    assert packed[0] == {"input_ids": [1, 2, 3], "mask": [1, 0, 1], "seq_lengths": [2, 1]}
    assert pack_dataset(rows, 2, "wrapped")["mask"][:] == [[1, 0], [1]]


def test_lists_of_a_fixed_size():
    features = Features({"input_ids": List(Value("int64"), length=2)})
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]}, features=features)
    assert pack_dataset(rows, 4)[:] == {"input_ids": [[1, 2, 3, 4]], "seq_lengths": [[2, 2]]}
    assert pack_dataset(rows, 3, "wrapped")[:] == {"input_ids": [[1, 2, 3], [4]]}


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_empty_data_set(strategy: str):
    rows = Dataset.from_dict({"input_ids": []}, features=Features({"input_ids": List(Value("int64"))}))
    packed = pack_dataset(rows, 8, strategy)
    assert len(packed) == 0
    assert ("seq_lengths" in packed.column_names) == (strategy == "bfd")


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_streaming_packs_batch_by_batch(strategy: str):
    stored = Dataset.from_dict(random_rows(30, 5))
    packed = pack_dataset(stored.to_iterable_dataset(), 64, strategy, {"batch_size": 10})
    by_hand = [
        row for start in (0, 10, 20) for row in pack_dataset(stored.select(range(start, start + 10)), 64, strategy)
    ]
    assert list(packed) == by_hand


def test_streaming_goes_on_where_it_stopped():
    def fresh():
        return pack_dataset(
            Dataset.from_dict(random_rows(40, 7)).to_iterable_dataset(), 64, map_kwargs={"batch_size": 10}
        )

    expected = list(fresh())
    source = fresh()
    iterator = iter(source)
    for _ in range(5):
        next(iterator)
    state = source.state_dict()
    resumed = fresh()
    resumed.load_state_dict(state)
    assert list(resumed) == expected[5:]


def test_columns_beyond_an_int32_offset_go_into_chunks(monkeypatch):
    monkeypatch.setattr("trl.data.ragged.MAX_CHUNK_VALUES", 100)
    table = Dataset.from_dict(random_rows(60, 9)).data.table
    packed = pack_table(table, 64, "bfd")
    assert packed["input_ids"].num_chunks > 1
    monkeypatch.undo()
    assert packed.equals(pack_table(table, 64, "bfd"))


def test_lists_of_lists_are_joined_as_their_tokens_are():
    rows = Dataset.from_dict(
        {
            "input_ids": [[1], [2, 3, 4], [5, 6], [7, 8]],
            "best": [[[1, 9]], [[3, 9], [4, 9]], [], [[8, 9]]],
        }
    )
    packed = pack_dataset(rows, 4)
    assert packed["seq_lengths"][:] == [[3, 1], [2, 2]]
    assert packed["best"][:] == [[[3, 9], [4, 9], [1, 9]], [[8, 9]]]
    with pytest.raises(ValueError, match=r"'best'.*'wrapped'"):
        pack_dataset(rows, 4, "wrapped")
    long = {"input_ids": [[7], [1, 2, 3]], "best": [[[7]], [[1], [2], [3]]]}
    assert pack_dataset(Dataset.from_dict(long), 2)["best"][:] == [[[1], [2]], [[7]]]
    for wrong in ([[1], [2]], None):
        with pytest.raises(ValueError, match="column 'best', row 1"):
            pack_dataset(Dataset.from_dict({**long, "best": [[[7]], wrong]}), 2)


@pytest.mark.parametrize("inner", [List(Value("int64")), LargeList(Value("int64")), List(Value("int64"), length=2)])
@pytest.mark.parametrize("outer", [List, LargeList])
def test_lists_of_lists_of_any_form(outer, inner):
    features = Features({"input_ids": List(Value("int64")), "best": outer(inner)})
    best = [[[1, 9]], [[2, 9], [3, 9]]]
    rows = Dataset.from_dict({"input_ids": [[1], [2, 3]], "best": best}, features=features)
    packed = pack_dataset(rows, 4)
    assert packed.features["best"] == outer(inner) and packed["best"][:] == [[*best[1], *best[0]]]
    nothing = Dataset.from_dict({"input_ids": [[], []], "best": [[], []]}, features=features)
    assert len(pack_dataset(nothing, 4)) == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"input_ids": [[1, 2], [3]], "text": ["a", "b"]},
            "column 'text' is string, packing needs a list",
        ),
        ({"input_ids": [[1, 2], [3]], "words": [["a"], ["b"]]}, "column 'words' is list<"),
        (
            {"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3, 4]]},
            "column 'labels', row 1: 2 items, but 'input_ids' has 1",
        ),
        ({"input_ids": [[1, 2], None]}, "column 'input_ids', row 1 .*None"),
        ({"input_ids": [[1, None], [3]]}, "column 'input_ids' has 1 items that are None"),
    ],
)
@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_what_cannot_be_packed(columns, message: str, strategy: str):
    with pytest.raises(ValueError, match=message):
        pack_dataset(Dataset.from_dict(columns), 8, strategy)


datasets.disable_progress_bars()
