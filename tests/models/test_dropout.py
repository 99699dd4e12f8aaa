"""Dropout switched off stays off in training mode."""

import torch

from tests.tiny import tiny_model
from trl.models.dropout import disable_dropout_in_model


def test_training_mode_becomes_deterministic():
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout_in_model(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
