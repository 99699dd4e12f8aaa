"""Gradient checkpointing: same gradients, off for a block, restored after an error."""

import pytest
import torch

from tests.tiny import tiny_model
from trl.models.checkpointing import disable_gradient_checkpointing, enable_gradient_checkpointing

IDS = torch.tensor([[1, 7, 9, 4, 2]])


def gradient(model):
    model.train()
    model(IDS, labels=IDS).loss.backward()
    return model.model.layers[0].self_attn.q_proj.weight.grad


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_gradients_do_not_change(kwargs):
    checkpointed = enable_gradient_checkpointing(tiny_model("llama"), kwargs)
    assert checkpointed.is_gradient_checkpointing
    torch.testing.assert_close(gradient(checkpointed), gradient(tiny_model("llama")), atol=0, rtol=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_reach_a_layer_behind_a_frozen_embedding(use_reentrant):
    model = enable_gradient_checkpointing(tiny_model("llama"), {"use_reentrant": use_reentrant})
    model.get_input_embeddings().requires_grad_(False)
    assert gradient(model).abs().sum() > 0


def test_off_inside_the_block_and_restored_after_it():
    model = enable_gradient_checkpointing(tiny_model("llama"), None)
    with (
        pytest.raises(RuntimeError, match="inside"),
        disable_gradient_checkpointing(model, {"use_reentrant": True}),
    ):
        assert not model.is_gradient_checkpointing
        raise RuntimeError("inside")
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    plain = tiny_model("llama")
    with disable_gradient_checkpointing(plain):
        assert not plain.is_gradient_checkpointing
    assert not plain.is_gradient_checkpointing
