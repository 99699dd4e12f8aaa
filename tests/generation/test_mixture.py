"""The mixture of a policy and its reference: log-probs of its samples against both models' plain logits, float64."""

import pytest
import torch

from tests.tiny import tiny_model
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine
from trl.generation.transformers.mixture import MixtureEngine, TurnsEngine
from trl.models.reference import AdapterReference, FrozenModel

PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13]]


def sampling(**settings):
    return Sampling(max_new_tokens=6, stop_token_ids=(16,), seed=3, **settings)


def models(architecture, reference="llama"):
    policy = tiny_model(architecture, dtype=torch.float64, seed=0)
    return policy, FrozenModel(tiny_model(reference, dtype=torch.float64, seed=1), None)


def mixed_logps(policy, other, share, prompt, ids, temperature):
    """By definition: `p^(1 - c) p_ref^c`, normalised, at each token."""
    tokens = torch.tensor([prompt + ids])
    with torch.no_grad():
        ours, theirs = (model(tokens).logits[0].log_softmax(-1) for model in (policy, other))
    mixture = ((1 - share) * ours + share * theirs).log_softmax(-1)
    logps = (mixture / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return logps.gather(-1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize(("architecture", "reference"), [("llama", "llama"), ("gpt2", "qwen3")])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_samples_come_from_the_geometric_mixture(architecture, reference, share):
    policy, frozen = models(architecture, reference)
    engine = MixtureEngine(policy, frozen, coefficient=lambda: share, max_batch=3)
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, sampling(temperature=0.8)), strict=True):
        expected = mixed_logps(policy, frozen.module, share, prompt, found.ids, 0.8)
        torch.testing.assert_close(found.logps.double(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("share", "of"), [(0.0, 0), (1.0, 1)])
def test_the_ends_are_the_models_themselves(share, of):
    policy, frozen = models("llama")
    alone = TransformersEngine((policy, frozen.module)[of])
    mixture = MixtureEngine(policy, frozen, coefficient=lambda: share)
    found, expected = (engine.generate(PROMPTS, sampling()) for engine in (mixture, alone))
    assert [each.ids for each in found] == [each.ids for each in expected]


def test_a_policy_with_an_adapter_is_mixed_with_its_base():
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama", dtype=torch.float64, seed=1)
    policy = get_peft_model(tiny_model("llama", dtype=torch.float64, seed=1), LoraConfig(r=4, init_lora_weights=False))
    reference = AdapterReference(scorer=None)
    engine = MixtureEngine(policy, reference, coefficient=lambda: 0.4)
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, sampling()), strict=True):
        expected = mixed_logps(policy, base, 0.4, prompt, found.ids, 1.0)
        torch.testing.assert_close(found.logps.double(), expected, rtol=0, atol=1e-9)
    assert not policy.base_model.model.model.layers[0].self_attn.q_proj.disable_adapters


def test_two_engines_take_turns():
    policy, frozen = models("llama")
    ours, theirs = TransformersEngine(policy), TransformersEngine(frozen.module)
    found = TurnsEngine(ours, theirs).generate(PROMPTS, sampling(), streams=[7, 8, 9, 10])
    for turn, engine in enumerate((ours, theirs)):
        alone = engine.generate(PROMPTS[turn::2], sampling(), streams=[7 + turn, 9 + turn])
        assert [each.ids for each in found[turn::2]] == [each.ids for each in alone]


def test_a_model_without_our_cache_is_refused():
    _, frozen = models("llama")
    with pytest.raises(ValueError, match="fails on packed rows"):
        MixtureEngine(tiny_model("bloom"), frozen, coefficient=lambda: 0.5)
