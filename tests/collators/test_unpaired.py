import itertools

import pytest
import torch
from tests.trainer.kto_runs import rows

from trl.collators.preference import DPODataCollatorWithPadding
from trl.collators.unpaired import UnpairedCollator, as_unpaired_batch, single_completions


def mismatched(**changes):
    others = [rows()[-1], *rows()[:-1]]
    return [
        {**row, "KL_completion_input_ids": other["completion_input_ids"], **changes}
        for row, other in zip(rows(), others, strict=True)
    ]


def sequences(batch):
    """Token ids and labels of each plain sequence of a packed row."""
    starts = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["input_ids"].shape[1]]
    return [
        (batch["input_ids"][0, start:end].tolist(), batch["labels"][0, start:end].tolist())
        for start, end in itertools.pairwise(starts)
    ]


@pytest.mark.parametrize("own_prompts", [False, True])
@pytest.mark.parametrize("sharing", [True, False])
def test_each_completion_alone(sharing, own_prompts):
    given = mismatched()
    if own_prompts:
        given[2]["KL_prompt_input_ids"] = given[2]["prompt_input_ids"][1:]
    batch = UnpairedCollator(sharing, mismatched=True)(given)
    for number, column in enumerate(("completion_input_ids", "KL_completion_input_ids")):
        expected = []
        for row in given:
            prompt = (number and row.get("KL_prompt_input_ids")) or row["prompt_input_ids"]
            expected.append((prompt + row[column], [-100] * len(prompt) + row[column]))
        assert sequences(single_completions(batch, number, of=2)) == expected
    assert batch["label"].tolist() == [row["label"] for row in given]
    padded = {name: torch.arange(8).view(4, 2) for name in ("input_ids", "attention_mask", "labels")}
    assert single_completions(padded, 1, of=2)["labels"].tolist() == [[2, 3], [6, 7]]


def test_numbers_of_the_rows():
    (batch,) = [UnpairedCollator(mismatched=True)(mismatched(reference_logps=-1.5, reference_KL_logps=-2.5))]
    assert batch["ref_logps"].tolist() == [-1.5] * 8 and batch["ref_kl_logps"].tolist() == [-2.5] * 8
    batch = UnpairedCollator()(
        [{**rows()[0], "embedding_input_ids": [7]}, {**rows()[1], "embedding_input_ids": [8, 9]}]
    )
    assert batch["embedding_input_ids"].tolist() == [[7, 0], [8, 9]]
    assert batch["embedding_attention_mask"].tolist() == [[1, 0], [1, 1]]


def test_padded_rows_of_a_user():
    padded = DPODataCollatorWithPadding()(mismatched(reference_logps=-1.5, reference_KL_logps=-2.5))
    found = as_unpaired_batch(padded, prefix_sharing=True, mismatched=True)
    expected = UnpairedCollator(mismatched=True)(mismatched(reference_logps=-1.5, reference_KL_logps=-2.5))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].to(value.dtype), value), name


def test_whole_sequences_of_a_user():
    """Completions that hold their prompts, with labels, as the 0.26 rows have them."""
    row = {
        "prompt_input_ids": [5, 6], "completion_input_ids": [5, 6, 7], "completion_labels": [-100, -100, 7], "label": True,
    }  # fmt: skip
    found = as_unpaired_batch(DPODataCollatorWithPadding()([row]), prefix_sharing=True)
    assert found["input_ids"].tolist() == [[5, 6, 7]]


def test_an_encoder_decoders_batch():
    batch = UnpairedCollator(mismatched=True, encoder_pad=0)(mismatched())
    alone = single_completions(batch, 1, of=2)
    assert alone["decoder_prompt"].tolist() == list(range(8))
    own = [row[row != -100].tolist() for row in alone["decoder_labels"]]
    assert own == [row["KL_completion_input_ids"] for row in mismatched()]
