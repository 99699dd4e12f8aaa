"""Layouts of SFT have one gradient; cuts, chunks and processes are those of `tests/contracts/test_invariance.py`.

float64 throughout; gradients agree to 1e-10 of the largest gradient.
"""

import pytest
import torch

from tests.tiny import tiny_model
from tests.trainer.one_step import assert_same_gradient, fixed_rows, run
from trl.models.scoring import base as scorer_base

SPLITS = {
    "1x8": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "2x4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "4x2": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "8x1": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
}
LAYOUTS = {
    "padded": {},
    "padding-free": {"padding_free": True},
    "packed": {"packing": True, "max_length": 24, "per_device_train_batch_size": 8},
    "multiple": {"pad_to_multiple_of": 16},
    "flat multiple": {"padding_free": True, "pad_to_multiple_of": 32},
}


@pytest.fixture(scope="module")
def whole():
    return run()[1].steps[0]


@pytest.mark.parametrize("layout", ["padding-free", "multiple", "flat multiple"])
def test_layouts(layout, whole):
    _, keep = run(**{**SPLITS["4x2"], **LAYOUTS[layout]})
    assert_same_gradient(keep.steps[0], whole)


@pytest.mark.parametrize("batch", [8, 1])
def test_packing(batch, whole):
    packed = {**LAYOUTS["packed"], "per_device_train_batch_size": batch}
    rows = len(run(**packed, max_steps=1)[0].train_dataset) if batch == 1 else 1
    _, keep = run(**packed, gradient_accumulation_steps=rows)
    assert_same_gradient(keep.steps[0], whole)


def test_rows_that_a_model_pads_itself(whole, monkeypatch):
    """The fallback of models that take no flat rows: padded rows, also for packed ones."""
    monkeypatch.setattr(scorer_base, "packed_unsupported", lambda model: "of this test")
    for layout in LAYOUTS.values():
        trainer, keep = run(**layout)
        assert not trainer.scorer.packed
        assert_same_gradient(keep.steps[0], whole)


def test_offloading(whole):
    assert_same_gradient(run(activation_offloading=True)[1].steps[0], whole)


def test_a_plain_loop_gives_this_gradient(whole):
    """Nothing of ours: the mean of -log p over all trained tokens, row by row."""
    model = tiny_model("gpt2", dtype=torch.float64)
    losses = []
    for row in fixed_rows():
        ids, mask = torch.tensor([row["input_ids"]]), torch.tensor(row["completion_mask"][1:]).bool()
        logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        losses.append(-logps[mask])
    torch.cat(losses).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradient(whole, expected)
