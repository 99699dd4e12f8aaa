"""Dropout switched off stays off in training mode."""

import pytest
import torch

from tests.tiny import tiny_model
from trl.models.dropout import disable_dropout_in_model


def test_training_mode_becomes_deterministic():
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout_in_model(model)
    assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("architecture", "dropout"),
    [("llama", {"attention_dropout": 0.5}), ("opt", {"dropout": 0.5}), ("gpt2", {"attn_pdrop": 0.5})],
)
def test_dropout_that_is_no_module_is_switched_off_too(architecture, dropout):
    model = tiny_model(architecture, **dropout).train()
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout_in_model(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
