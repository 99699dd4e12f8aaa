"""Log-probabilities in advance are those of a live reference, and are computed once."""

import json
import logging
import math
from functools import partial

import datasets
import pytest
import torch
from datasets import Dataset, Features, List, Value

from tests.trainer.precompute_worker import COLUMNS, Counted, collate, pair_rows
from tests.two_processes import launch
from trl.checkpoints.identity import hash_rows
from trl.trainer.precompute import FOLDER


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Every test has a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)


def rows(count=7):
    return Dataset.from_list(pair_rows(count))


def test_they_are_the_live_ones_bit_for_bit():
    counted = Counted()
    found = counted.run(rows(), batch_size=2)
    for start in range(0, 7, 2):
        live = counted.score(collate(pair_rows()[start : start + 2]))
        for name in COLUMNS:
            stored = torch.tensor(found[name][start : start + 2], dtype=live[name].dtype)
            assert torch.equal(stored, live[name])


def test_a_second_run_asks_the_reference_nothing(caplog):
    first, second = Counted(), Counted()
    with caplog.at_level(logging.INFO):
        found = first.run(rows())
        again = second.run(rows(), batch_size=5)
    assert (first.rows, second.rows) == (7, 0)
    assert "are kept in" in caplog.text
    assert "are read from" in caplog.text
    assert found.column_names == again.column_names == [*rows().column_names, *COLUMNS]
    assert all(list(found[name]) == list(again[name]) for name in COLUMNS)


CHANGES = {
    "rows": lambda: (Counted(), Dataset.from_list(pair_rows(6)), {}),
    "order": lambda: (Counted(), rows().select([1, 0, 2, 3, 4, 5, 6]), {}),
    "weights": lambda: (Counted(seed=2), rows(), {}),
    "precision": lambda: (Counted(dtype=torch.bfloat16), rows(), {}),
    "settings": lambda: (Counted(), rows(), {"settings": {"ld_alpha": 0.5}}),
    "collator": lambda: (Counted(), rows(), {"collate": partial(shortened, at_most=1)}),
    "its settings": lambda: (Counted(), rows(), {"collate": partial(shortened, at_most=2)}),
}


def shortened(given, *, at_most):
    """A collator that makes the tokens itself."""
    return collate([{**row, "chosen_input_ids": row["chosen_input_ids"][:at_most]} for row in given])


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_values_is_computed_again(change):
    Counted().run(rows())
    Counted().run(rows(), collate=partial(shortened, at_most=3))
    counted, dataset, options = CHANGES[change]()
    counted.run(dataset, **options)
    assert counted.rows == len(dataset)


def test_every_kind_of_value_counts():
    features = Features({
        "text": Value("string"), "data": Value("binary"), "flag": Value("bool"), "number": Value("float64"),
        "nested": List({"role": Value("string"), "ids": List(Value("int32"))}),
    })  # fmt: skip
    row = {
        "text": "ab",
        "data": b"\x00",
        "flag": True,
        "number": 0.5,
        "nested": [{"role": "user", "ids": [1, 2]}],
    }
    others = [
        {"text": "a"}, {"text": None}, {"data": b""}, {"flag": False}, {"flag": None}, {"number": math.nextafter(0.5, 1)},
        {"nested": []}, {"nested": [{"role": "user", "ids": [1, 3]}]}, {"nested": [{"role": "use", "ids": [1, 2]}]},
        {"nested": [{"role": "user", "ids": []}, {"role": "user", "ids": [1, 2]}]}, {"nested": None},
    ]  # fmt: skip
    seen = [hash_rows(Dataset.from_list([{**row, **other}], features=features)) for other in [{}, *others]]
    assert len(set(seen)) == len(seen)
    cut = [Dataset.from_list([{**row, "text": t} for t in texts], features=features) for texts in (["a", "bc"], ["ab", "c"])]  # fmt: skip
    assert hash_rows(cut[0]) != hash_rows(cut[1])


def test_a_dataset_with_its_own_columns_keeps_them():
    own = rows().add_column("ref_chosen_logps", [0.5] * 7)
    counted = Counted()
    with pytest.raises(ValueError, match=r"lacks \['ref_rejected_logps'\]"):
        counted.run(own)
    own = own.add_column("ref_rejected_logps", [-0.5] * 7)
    assert counted.run(own)["ref_chosen_logps"][:] == [0.5] * 7
    assert counted.rows == 0


@pytest.mark.parametrize("data", [rows().to_iterable_dataset(), pair_rows()])
def test_only_datasets_that_can_be_gone_over(data):
    with pytest.raises(ValueError, match=r"needs a datasets\.Dataset, got a (IterableDataset|list)"):
        Counted().run(data)


def test_values_that_are_not_finite_name_their_row(tmp_path):
    counted = Counted()

    def score(batch):
        found = counted.score(batch)
        return {**found, "ref_chosen_logps": found["ref_chosen_logps"] / (batch["input_ids"][::2, 0] != pair_rows()[4]["prompt_input_ids"][0])}  # fmt: skip

    with pytest.raises(ValueError, match=r"row 4: ref_chosen_logps must be finite, got -inf \(1 such"):
        counted.run(rows(), score=score)
    assert not list((tmp_path / FOLDER).glob("*"))


def test_an_unfinished_or_foreign_file_is_not_read(tmp_path):
    first = Counted()
    first.run(rows())
    (file,) = (tmp_path / FOLDER).iterdir()
    from safetensors.numpy import load_file, save_file

    values = load_file(file)
    save_file({name: numbers[:3] for name, numbers in values.items()}, file)
    (tmp_path / FOLDER / "tmp1.incomplete").write_bytes(b"half")
    second = Counted()
    second.run(rows())
    assert second.rows == 7
    assert all(len(numbers) == 7 for numbers in load_file(file).values())


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_share_the_work_and_agree(tmp_path):
    """Three batches: the second process does the last one too, because sharded weights need both."""
    launch("tests.trainer.precompute_worker", str(tmp_path), "3")
    found = [json.loads((tmp_path / f"columns_{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0]["columns"] == found[1]["columns"]
    first, again = found[0]["columns"]
    assert first == again
    alone = Counted().run(rows(), batch_size=3)
    assert first == {name: list(alone[name]) for name in COLUMNS}
    assert [process["rows"] for process in found] == [4, 4]
    assert len(list((tmp_path / "cache" / FOLDER).iterdir())) == 1
