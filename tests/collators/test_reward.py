import pytest
import torch
from tests.trainer.resume_worker import tokenizer

from trl.collators.reward import RewardCollator, RewardDataCollatorWithPadding, as_reward_batch, shared_length
from trl.models.packed.layout import count_tokens, padded_rows

ROWS = [
    {"chosen_input_ids": [5, 6, 7], "rejected_input_ids": [5, 6, 8, 9], "margin": 0.5},
    {"chosen_input_ids": [5, 6], "rejected_input_ids": [5, 6, 7], "margin": 1.0},
    {"chosen_input_ids": [3], "rejected_input_ids": [4, 4], "margin": 0.0},
    {"chosen_input_ids": [5, 6], "rejected_input_ids": [5, 6], "margin": 0.0},
]
SEQUENCES = [row[side] for row in ROWS for side in ("chosen_input_ids", "rejected_input_ids")]


def sequences(batch):
    """The sequences of a batch in order, without padding."""
    rows = padded_rows(batch, pad_token_id=0)
    return [ids[mask].tolist() for ids, mask in zip(rows["input_ids"], rows["attention_mask"].bool(), strict=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ([5, 6, 7], [5, 6, 8], 2),
        ([5, 6], [5, 6, 7], 1),
        ([5, 6], [5, 6], 1),
        ([5], [5], 0),
        ([5, 6], [6, 6], 0),
    ],
)
def test_each_branch_keeps_a_token(chosen, rejected, expected):
    assert shared_length(torch.tensor(chosen), torch.tensor(rejected)) == expected
    assert shared_length(torch.tensor(rejected), torch.tensor(chosen)) == expected


def test_what_a_pair_shares_stands_once():
    batch = RewardCollator()(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 5, 6, 6, 7, 3, 4, 4, 5, 6, 6]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 2, 3, 0, 1, 1, 2, 0, 0, 1, 0, 1, 1]]
    assert batch["segment_table"][0, 0, :4].tolist() == [
        [0, 2, 0, 0],
        [2, 1, 0, 2],
        [3, 2, 0, 2],
        [5, 1, 0, 0],
    ]
    assert batch["margin"].tolist() == [0.5, 1.0, 0.0, 0.0]
    assert "filler" not in batch


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("kind", ["shared", "plain", "padded"])
def test_every_layout_holds_the_same_sequences(kind, multiple):
    collate = RewardCollator(prefix_sharing=kind == "shared", packed=kind != "padded", pad_to_multiple_of=multiple)
    batch = collate(ROWS)
    assert sequences(batch) == SEQUENCES
    assert int(count_tokens(batch, of_sequences=True)) == sum(map(len, SEQUENCES))
    assert int(count_tokens(batch)) == (15 if kind == "shared" else sum(map(len, SEQUENCES)))
    if multiple:
        assert batch["input_ids"].shape[1] % multiple == 0


def test_empty_sequences_and_batches_are_errors():
    for packed in (True, False):
        with pytest.raises(ValueError, match=r"row 1 of the batch has sequences of \[2, 0\] tokens"):
            RewardCollator(packed=packed)([ROWS[0], {"chosen_input_ids": [1, 2], "rejected_input_ids": []}])
    with pytest.raises(ValueError, match="at least 1 row"):
        as_reward_batch({"input_ids_chosen": torch.zeros(0, 1), "input_ids_rejected": torch.zeros(0, 1)}, prefix_sharing=True)  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("older", [True, False])
def test_the_older_collator(older, side):
    """Padded by the tokenizer, apart; the trainer makes the same packed batch of it."""
    padding = tokenizer()
    padding.padding_side = side
    rows = ROWS
    if older:
        rows = [
            {
                "input_ids_chosen": row["chosen_input_ids"],
                "attention_mask_chosen": [1] * len(row["chosen_input_ids"]),
                "input_ids_rejected": row["rejected_input_ids"],
                "attention_mask_rejected": [1] * len(row["rejected_input_ids"]),
                "margin": row["margin"],
            }
            for row in ROWS
        ]
    batch = RewardDataCollatorWithPadding(padding)(rows)
    assert set(batch) == {
        "input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected", "margin", "return_loss",
    }  # fmt: skip
    assert batch["input_ids_chosen"].shape == (4, 3) and batch["input_ids_rejected"].shape == (4, 4)
    assert batch["attention_mask_chosen"][2].tolist() == ([0, 0, 1] if side == "left" else [1, 0, 0])
    assert batch["return_loss"] is True
    as_tensors = [{name: torch.as_tensor(value) for name, value in row.items()} for row in rows]
    found = RewardDataCollatorWithPadding(padding)(as_tensors)
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(batch[name])) for name in batch)
    for sharing in (True, False):
        found, expected = (
            as_reward_batch(batch, prefix_sharing=sharing),
            RewardCollator(prefix_sharing=sharing)(ROWS),
        )
        assert found.keys() == expected.keys()
        assert all(found[name].tolist() == expected[name].tolist() for name in expected)


def test_batches_of_other_collators():
    ids = torch.tensor([[5, 6], [5, 7], [3, 4], [4, 4]])
    batch = as_reward_batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, prefix_sharing=True)
    assert batch["rows"].tolist() == [0, 1] and batch["input_ids"].tolist() == ids[[0, 2, 1, 3]].tolist()
    whole = as_reward_batch({"chosen_input_ids": ids[:2], "rejected_input_ids": ids[2:]}, prefix_sharing=False)
    assert sequences(whole) == [[5, 6], [3, 4], [5, 7], [4, 4]]
    with pytest.raises(ValueError, match="an even number"):
        as_reward_batch({"input_ids": ids[:3]}, prefix_sharing=True)
    with pytest.raises(ValueError, match="must have input_ids_chosen, input_ids_rejected"):
        as_reward_batch({"tokens": ids}, prefix_sharing=True)
    with pytest.raises(ValueError, match="chosen_input_ids"):
        RewardDataCollatorWithPadding(tokenizer())([{"text": "Look up."}])
    hidden = {"input_ids_chosen": [5, 6], "attention_mask_chosen": [0, 1], "input_ids_rejected": [7]}
    assert RewardDataCollatorWithPadding(tokenizer())([hidden])["attention_mask_chosen"].tolist() == [[0, 1]]
