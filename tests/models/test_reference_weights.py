"""Reference models: whole copies, and copies that share the lower layers as the same tensors."""

import pytest
import torch

from tests.tiny import tiny_model, tiny_seq2seq
from trl.models.reference_weights import create_reference_model
from trl.models.value_head import AutoModelForCausalLMWithValueHead

IDS = torch.tensor([[5, 6, 7, 8]])


def shared_names(model, reference):
    others = dict(reference.named_parameters())
    return {name for name, parameter in model.named_parameters() if others[name] is parameter}


@pytest.mark.parametrize("wrap", [False, True])
def test_a_whole_copy_is_frozen_and_does_not_follow(wrap):
    model = tiny_model("llama")
    if wrap:
        model = AutoModelForCausalLMWithValueHead.from_pretrained(model)
    reference = create_reference_model(model.train())
    assert not shared_names(model, reference)
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert not reference.training
    assert model.training
    before = reference(input_ids=IDS)[0].clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(reference(input_ids=IDS)[0], before)


@pytest.mark.parametrize(
    ("architecture", "first"),
    [
        ("llama", "model.layers.1."),
        ("gpt2", "transformer.h.1."),
        ("gpt_neox", "gpt_neox.layers.1."),
        ("opt", "layers.1."),
    ],
)
def test_shared_layers_are_the_same_tensors_and_frozen_in_both(architecture, first):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_model(architecture, tie_word_embeddings=False))
    reference = create_reference_model(model, num_shared_layers=1)
    names = [name for name, _ in model.named_parameters()]
    start = next(i for i, name in enumerate(names) if first in name)
    assert shared_names(model, reference) == set(names[:start])
    assert any("layers.0." in name or "h.0." in name for name in names[:start])
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(names[start:])
    assert not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        model.v_head.summary.weight.add_(1.0)
    assert not torch.equal(model.v_head.summary.weight, reference.v_head.summary.weight)


def test_an_encoder_is_shared_whole():
    model = tiny_seq2seq("t5")
    reference = create_reference_model(model, num_shared_layers=1)
    shared = shared_names(model, reference)
    assert {name for name, _ in model.named_parameters() if name.startswith("encoder.")} <= shared
    assert any(name.startswith("decoder.block.0.") for name in shared)
    assert not any(name.startswith("decoder.block.1.") for name in shared)


@pytest.mark.parametrize(("layers", "pattern"), [(2, None), (99, None), (1, "blocks.{layer}")])
def test_layers_that_are_not_there_are_an_error(layers, pattern):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="num_shared_layers="):
        create_reference_model(model, num_shared_layers=layers, pattern=pattern)
    assert all(p.requires_grad for p in model.parameters())
