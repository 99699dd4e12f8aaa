"""What makes a run the same: method, model, rows and settings."""

import pytest
from datasets import Dataset
from transformers import LlamaConfig

from tests.checkpoints.made import make_checkpoint
from trl.checkpoints.identity import compare, fingerprint, run_facts
from trl.checkpoints.wholeness import CheckpointError

ROWS = [{"input_ids": list(range(n % 7 + 1)), "name": f"row {n}"} for n in range(2500)]


def facts(**changes):
    given = {
        "method": "SFT", "config": LlamaConfig(hidden_size=32, num_attention_heads=4), "adapters": {},
        "dataset": Dataset.from_list(ROWS[:20]), "settings": {"learning_rate": 0.1, "seed": 1, "save_steps": 5},
    }  # fmt: skip
    return run_facts(**{**given, **changes})


def test_a_fingerprint_knows_rows_and_their_number():
    own = fingerprint(Dataset.from_list(ROWS))
    assert own == fingerprint(Dataset.from_list(ROWS).map(lambda row: row))
    assert own == fingerprint(Dataset.from_list(ROWS).add_column("ref_logps", [0.5] * 2500))
    assert own["rows"] == 2500
    for row in (0, 2499):  # the first and the last are always looked at
        changed = [*ROWS]
        changed[row] = {**ROWS[row], "name": "changed"}
        assert fingerprint(Dataset.from_list(changed))["hash"] != own["hash"]
    assert fingerprint(Dataset.from_list(ROWS[:-1])) != own
    assert fingerprint(Dataset.from_list(ROWS[::-1])) != own
    unseen = [*ROWS]
    unseen[1] = {**ROWS[1], "name": "changed"}  # 1,000 of 2,500: rows 0, 2, 5, ...
    assert fingerprint(Dataset.from_list(unseen)) == own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "DPO"}, "is of a run of SFT, and this is DPO"),
        ({"config": LlamaConfig(hidden_size=64, num_attention_heads=4)}, r"of another model \(.*hidden_size: 32, now 64"),
        ({"dataset": Dataset.from_list(ROWS[:19])}, r"other rows \(20, now 19\).*ignore_data_skip=True"),
    ],
)  # fmt: skip
def test_another_run_is_refused(changes, message, tmp_path):
    path = make_checkpoint(tmp_path, 5, **facts())
    with pytest.raises(CheckpointError, match=message):
        compare(path, facts(**changes))


def test_other_rows_are_allowed_where_data_is_not_skipped(tmp_path):
    path = make_checkpoint(tmp_path, 5, **facts())
    other = facts(dataset=Dataset.from_list(ROWS[:19]))
    assert compare(path, other, ignore_data=True) == []
    assert compare(path, facts(dataset=Dataset.from_list(ROWS).to_iterable_dataset())) == []


def test_other_settings_are_a_line_each(tmp_path):
    path = make_checkpoint(tmp_path, 5, **facts())
    assert compare(path, facts()) == []
    settings = {"learning_rate": 0.2, "seed": 2, "save_steps": 9, "new": 3}
    assert compare(path, facts(settings=settings)) == ["learning_rate: 0.1, now 0.2", "seed: 1, now 2"]
    assert compare(make_checkpoint(tmp_path, 6), facts()) == []  # of another program
