"""Gradient checkpointing: same gradients, off for a block, restored after an error. Dropout: off in training mode too."""

import pytest
import torch

from tests.tiny import tiny_model
from trl.models.switches import (
    checkpointed_modules,
    disable_dropout_in_model,
    disable_gradient_checkpointing,
    enable_gradient_checkpointing,
)

IDS = torch.tensor([[1, 7, 9, 4, 2]])


def gradient(model):
    model.train()
    model(IDS, labels=IDS).loss.backward()
    return model.model.layers[0].self_attn.q_proj.weight.grad


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_gradients_do_not_change(kwargs):
    checkpointed = enable_gradient_checkpointing(tiny_model("llama"), kwargs)
    assert set(checkpointed.model.layers) <= set(checkpointed_modules(checkpointed))
    torch.testing.assert_close(gradient(checkpointed), gradient(tiny_model("llama")), atol=0, rtol=0)


def test_off_inside_the_block_and_restored_after_it():
    model = enable_gradient_checkpointing(tiny_model("llama"), None)
    with (
        pytest.raises(RuntimeError, match="inside"),
        disable_gradient_checkpointing(model, {"use_reentrant": True}),
    ):
        assert not checkpointed_modules(model)
        raise RuntimeError("inside")
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    plain = tiny_model("llama")
    with disable_gradient_checkpointing(plain):
        assert not checkpointed_modules(plain)
    assert not checkpointed_modules(plain)


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
