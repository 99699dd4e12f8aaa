"""Rows of tokens as packers and tokenizers make them: masks, positions that restart, lengths of documents."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from tests.contracts.methods import trained
from tests.contracts.test_token_rows import padded
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.one_step import assert_same_steps, fixed_rows

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.data.pipeline import prepare_dataset
from trl.data.text import SFTPreparation
from trl.data.token_rows import real_row

TEXTS = ["The sky is blue.", "How many apples? Seven.", "And then? Look up.", "Blue."]


def joined(rows):
    """Two documents in each row, with positions that restart."""
    return [
        {
            **{name: one[name] + two[name] for name in one},
            "position_ids": [*range(len(one["input_ids"])), *range(len(two["input_ids"]))],
        }
        for one, two in zip(rows[::2], rows[1::2], strict=True)
    ]


def with_lengths(rows):
    return [
        {
            **{name: one[name] + two[name] for name in one},
            "seq_lengths": [len(one["input_ids"]), len(two["input_ids"])],
        }
        for one, two in zip(rows[::2], rows[1::2], strict=True)
    ]


def numbered(rows):
    """As packers for attention kernels of varying length write them: the number of its document for each token."""
    return [
        {
            **{name: one[name] + two[name] + [0] * 3 for name in one},
            "attention_mask": [1] * len(one["input_ids"]) + [2] * len(two["input_ids"]) + [0] * 3,
        }
        for one, two in zip(rows[::2], rows[1::2], strict=True)
    ]


def stream_of(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


PACKED = {
    "positions": joined,
    "lengths": with_lengths,
    "numbers": numbered,
    "padded positions": lambda rows: padded(joined(rows)),
    "padded lengths": lambda rows: padded(with_lengths(rows)),
}


@pytest.mark.parametrize("make_set", [Dataset.from_list, stream_of])
@pytest.mark.parametrize("form", PACKED)
def test_rows_packed_before_train_as_their_documents(form, make_set):
    expected = trained("sft", max_length=64)
    rows = PACKED[form](fixed_rows())
    found = trained("sft", train_dataset=make_set(rows), per_device_train_batch_size=4, max_length=64)
    assert_same_steps(found.keep.steps, expected.keep.steps, 1e-12)
    loss = found.evaluate(make_set(rows))["eval_loss"]
    assert loss == pytest.approx(expected.evaluate(Dataset.from_list(fixed_rows()))["eval_loss"], rel=1e-12)


@pytest.mark.parametrize("make_set", [Dataset.from_list, stream_of])
@pytest.mark.parametrize("form", PACKED)
def test_packing_refuses_rows_packed_before(form, make_set):
    with pytest.raises(ValueError, match=r"train dataset, row \d, column .*(seq_lengths|position_ids).*packing=False"):
        trained("sft", train_dataset=make_set(PACKED[form](fixed_rows())), packing=True, max_length=64)


def test_positions_of_single_documents_change_nothing():
    rows = [{**row, "position_ids": list(range(len(row["input_ids"])))} for row in fixed_rows()]
    prepared, _ = prepare_dataset(Dataset.from_list(rows), tiny_tokenizer(), SFTPreparation())
    assert prepared.column_names == ["input_ids", "completion_mask"]
    for settings in ({}, {"packing": True, "max_length": 16}):
        found = trained("sft", train_dataset=Dataset.from_list(rows), **settings)
        assert_same_steps(found.keep.steps, trained("sft", **settings).keep.steps, 0)


WRONG = {
    "a document begins at 3": {"position_ids": [0, 1, 3]},
    "expected one for each": {"position_ids": [0, 1]},
    r"\[3\] as in": {"position_ids": [0, 1, 0], "seq_lengths": [3]},
}


@pytest.mark.parametrize("says", WRONG)
def test_positions_that_do_not_fit(says):
    rows = [{"input_ids": [5, 6, 7], **WRONG[says]}]
    with pytest.raises(ValueError, match=f"train dataset, row 0, column 'position_ids': .*{says}"):
        prepare_dataset(Dataset.from_list(rows), tiny_tokenizer(), SFTPreparation())
    with pytest.raises(ValueError, match=f"row 0 of the batch, column 'position_ids': .*{says}"):
        DataCollatorForLanguageModeling(0)(rows)


@pytest.mark.parametrize("mask", [[1, 3, 3], [2, 2, 2], [1, 2, 1], [-1, 1, 1]])
def test_documents_in_a_mask_are_counted_from_one(mask):
    rows = [{"input_ids": [5, 6, 7], "attention_mask": mask}]
    with pytest.raises(
        ValueError, match=r"column 'attention_mask': value .* or the number of its document, 0 for padd"
    ):
        prepare_dataset(Dataset.from_list(rows), tiny_tokenizer(), SFTPreparation())


def test_documents_in_a_mask_are_those_of_the_lengths():
    row = {"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 2, 0]}
    assert real_row({**row, "seq_lengths": [2, 1]}, "train", 0)["seq_lengths"] == [2, 1]
    with pytest.raises(ValueError, match=r"documents of \[2, 1\] tokens, expected \[1, 2\] as in 'seq_lengths'"):
        real_row({**row, "seq_lengths": [1, 2]}, "train", 0)


def test_the_collator_reads_positions_and_masks():
    row = {"input_ids": [0, 5, 6, 7], "position_ids": [0, 0, 1, 0], "attention_mask": [0, 1, 1, 1]}
    batch = DataCollatorForLanguageModeling(0)([row, {"input_ids": [8, 9]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1]]
    row = {"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 2, 0]}
    assert DataCollatorForLanguageModeling(0)([row])["position_ids"].tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("method", ["prm", "grpo"])
def test_other_methods_refuse_rows_of_several_documents(method):
    from tests.trainer import grpo_runs, prm_runs

    rows = [{"input_ids": [5, 6, 7], "labels": [-100, -100, 1], "position_ids": [0, 1, 0]}] * 8
    with pytest.raises(ValueError, match="train dataset, row 0, column 'position_ids': a packed row"):
        if method == "prm":
            prm_runs.make(train_dataset=Dataset.from_list(rows))
        else:
            grpo_runs.make(data=Dataset.from_list(rows))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("format", [None, "torch", "numpy"])
def test_rows_of_a_tokenizer_call_with_padding(side, format):
    """As users have them: `dataset.map(lambda rows: tokenizer(rows["text"], padding=True))`, also with a tensor format."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    rows = Dataset.from_dict({"text": TEXTS}).map(lambda row: tokenizer(row["text"], padding=True), batched=True)
    assert {len(ids) for ids in rows["input_ids"]} == {max(map(len, rows["input_ids"]))}
    prepared, report = prepare_dataset(rows.with_format(format), tokenizer, SFTPreparation())
    assert [torch.as_tensor(ids).tolist() for ids in prepared["input_ids"]] == tokenizer(TEXTS)["input_ids"]
    assert prepared.format["type"] == format
    assert report.tokens == sum(map(len, tokenizer(TEXTS)["input_ids"]))
