"""Tokenised rows that were padded are trained on, with their attention masks, as the rows without padding, by every method.

float64 throughout. Rows are padded on the left, on the right and on both sides, with tokens that the model knows.
"""

from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from tests.contracts.methods import FAMILIES, ROWS, Found, metrics_of, trained
from tests.contracts.test_invariance import assert_same
from tests.experimental import ppo_runs
from tests.trainer import grpo_runs
from tests.trainer.group_methods import METHODS as GROUPS
from tests.trainer.group_methods import WHOLE

ALIGNED = ("input_ids", "labels", "completion_mask", "assistant_masks", "token_type_ids", "position_ids")
FILLED = 58
OF_ROWS = (
    "sft", "sft-padding-free", "gkd", "gkd-on-policy", "gkd-several", "gkd-columns", "dpo-sigmoid", "cpo-sigmoid", "orpo",
    "kto", "kto-apo", "bco", "bco-matched", "reward", "prm",
)  # fmt: skip
OF_GROUPS = ("grpo", "rloo", "minillm", "distillation", "online-dpo", "nash-md", "xpo")


def padded(rows: list[dict[str, Any]], *, sides: str = "lrb") -> list[dict[str, Any]]:
    """The rows with every column of tokens padded to one length, on the `sides` in turn, and with its mask."""
    made = [dict(row) for row in rows]
    for column in [name for name in rows[0] if "input_ids" in name]:
        width = max(len(row[column] or ()) for row in rows) + 2
        for number, row in enumerate(made):
            aligned = {
                name: column.replace("input_ids", name)
                for name in ALIGNED
                if row.get(column.replace("input_ids", name)) is not None
            }
            if not aligned:
                row[column.replace("input_ids", "attention_mask")] = None
                continue
            length = len(row[column])
            left = {"l": width - length, "r": 0, "b": (width - length) // 2}[sides[number % len(sides)]]
            around = [0] * left, [0] * (width - length - left)
            for name, own in aligned.items():
                fill = FILLED if name == "input_ids" else 1
                row[own] = [fill] * left + list(row[own]) + [fill] * (width - length - left)
            row[column.replace("input_ids", "attention_mask")] = [*around[0], *[1] * length, *around[1]]
    return made


def found_of(trainer: Any, rows: list[dict[str, Any]]) -> Found:
    log = {name: value for name, value in trainer.state.log_history[0].items() if name == "loss"}
    return Found(trainer.keep.steps, [log], metrics_of(trainer, Dataset.from_list(rows)))


def stream_of(rows: list[dict[str, Any]]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize("make_set", [Dataset.from_list, stream_of])
@pytest.mark.parametrize("method", OF_ROWS)
def test_padded_rows(method, make_set):
    make, settings = ROWS[method]
    rows = make(**settings).train_dataset.to_list()
    # Streams of SFT and GKD need a length that the model has positions for.
    settings = {"max_length": 64} if method.startswith(("sft", "gkd")) else {}
    found, expected = (
        found_of(trained(method, train_dataset=make_set(given), **settings), given[:7])
        for given in (padded(rows), rows)
    )
    assert_same(found, expected, 1e-12)
    assert found.evaluation == pytest.approx(expected.evaluation, rel=1e-12, abs=1e-12)


def test_padded_rows_packed():
    rows = ROWS["sft"][0]().train_dataset.to_list()
    settings = {"packing": True, "max_length": 16, "max_steps": 2}
    expected = trained("sft", train_dataset=Dataset.from_list(rows), **settings).keep.steps
    for sides in ("l", "r", "lrb"):
        found = trained("sft", train_dataset=Dataset.from_list(padded(rows, sides=sides)), **settings).keep.steps
        assert_same(Found(found, [], {}), Found(expected, [], {}), 0)


@pytest.mark.parametrize("method", OF_GROUPS)
def test_padded_prompts(method):
    rows = grpo_runs.prompts().to_list()
    settings = {**WHOLE, **GROUPS[method], "max_steps": 2, "mask_truncated_completions": False}
    trainer, keep = grpo_runs.run(**settings, data=Dataset.from_list(rows))
    expected = Found(keep.steps, [], metrics_of(trainer, Dataset.from_list(rows[:4])))
    for data in (Dataset.from_list(padded(rows)), stream_of(padded(rows))):
        if not isinstance(data, Dataset):
            settings["shuffle_dataset"] = False
            trainer, keep = grpo_runs.run(**settings, data=stream_of(rows))
            expected = Found(keep.steps, [], expected.evaluation)
        trainer, keep = grpo_runs.run(**settings, data=data)
        assert_same(Found(keep.steps, [], {}), expected, 0)
    found = metrics_of(trainer, Dataset.from_list(padded(rows)[:4]))
    assert found.keys() == expected.evaluation.keys()


def test_padded_prompts_of_ppo():
    rows = ppo_runs.prompts().to_list()
    expected = FAMILIES["ppo"].run("ppo", data=Dataset.from_list(rows), max_steps=2)
    found = FAMILIES["ppo"].run("ppo", data=Dataset.from_list(padded(rows)), max_steps=2)
    assert_same(found, expected, 1e-12)


COLUMNS = {"sft": "input_ids", "prm": "input_ids", "dpo-sigmoid": "chosen_input_ids", "reward": "rejected_input_ids", "kto": "completion_input_ids"}  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("method", COLUMNS)
def test_masks_that_do_not_fit(method, streams):
    make, settings = ROWS[method]
    rows, column = make(**settings).train_dataset.to_list(), COLUMNS[method]
    mask = column.replace("input_ids", "attention_mask")
    wrong = {"50 values for": [1] * 50, "value 2": [2] * len(rows[3][column]), "": [0] * len(rows[3][column])}
    for words, value in wrong.items():
        given = [{**row, mask: [1] * len(row[column])} for row in rows]
        given[3][mask] = value
        data = stream_of(given) if streams else Dataset.from_list(given)
        with pytest.raises(ValueError, match=rf"train dataset, row 3, column '{mask if words else column}'") as caught:
            make(**{**settings, "train_dataset": data})
        assert words in str(caught.value)
