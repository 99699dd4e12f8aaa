"""The scoring forward of vision-language models gives their own logits' log-probs and gradients, also under LoRA."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny_vision import FAMILIES, tiny_image, tiny_processor, tiny_vision_model
from trl.collators.images import DataCollatorForVisionLanguageModeling
from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions

ASK = {"role": "user", "content": "What colour is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
ROWS = [
    {"images": [tiny_image(0)], "messages": [ASK, BLUE]},
    {"images": [tiny_image(1), tiny_image(2, (16, 32))], "messages": [ASK, BLUE, ASK, BLUE]},
    {"images": [], "messages": [ASK, BLUE]},
]


def own_logps(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logps = model(**inputs).logits.log_softmax(-1)
    labels = batch["labels"][:, 1:]
    return logps[:, :-1].gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != -100]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    processor = tiny_processor(request.param)
    batch = DataCollatorForVisionLanguageModeling(processor)(ROWS)
    return request.param, processor, batch


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_log_probs_and_gradients_are_those_of_the_models_own_logits(family, lora):
    name, processor, batch = family
    model = tiny_vision_model(processor, name)
    if lora:
        targets = ["q_proj", "v_proj", "qkv", "lm_head"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    model.train()
    scorer = Scorer(model)
    assert scorer.uses_head and not scorer.packed
    expected = own_logps(model, batch)
    scored = scorer.score(model, batch)
    torch.testing.assert_close(scored.logps, expected, rtol=1e-5, atol=1e-5)
    expected = gradients(model, -expected.sum())
    local = scorer.score(model, batch, ScoreOptions(loss_of=lambda logps, _: -logps))
    for total in (-scored.logps.sum(), local.total):
        found = gradients(model, total)
        assert found.keys() == expected.keys()
        towers = [part for part in found if "vision" in part or "visual" in part]
        assert any(found[part].abs().max() > 0 for part in towers), "the vision tower learns"
        for part, gradient in expected.items():
            scale = gradient.abs().max().clamp(min=1)
            torch.testing.assert_close(found[part] / scale, gradient / scale, rtol=1e-5, atol=1e-5, msg=part)


def test_models_with_a_vision_tower_are_padded_and_say_so(family):
    """docs/methods/sft.md says why; the decoder of the same family, by itself, has packed rows."""
    name, processor, _ = family
    model = tiny_vision_model(processor, name)
    scorer = Scorer(model)
    assert not scorer.packed and not scorer.shares_prefixes
    assert any("padded" in text and "config is that of several models" in text for text in scorer.fallbacks)
    if name != "qwen2_vl":  # whose decoder has no class of its own
        assert Scorer(AutoModelForCausalLM.from_config(model.config.get_text_config())).packed


def test_a_models_images_and_token_types_reach_it(family):
    """Another image, or other token types, give other log-probs: nothing of them is dropped on the way."""
    name, processor, batch = family
    model = tiny_vision_model(processor, name)
    scorer = Scorer(model)
    logps = scorer.score(model, batch).logps
    for key in set(batch) & {"pixel_values", "token_type_ids"}:
        changed = {**batch, key: 1 - batch[key] if key == "token_type_ids" else -batch[key]}
        assert (scorer.score(model, changed).logps - logps).abs().max() > 1e-3, key


def test_padding_does_not_change_a_row(family):
    name, processor, batch = family
    model = tiny_vision_model(processor, name)
    found = Scorer(model).score(model, batch).logps
    rows = [DataCollatorForVisionLanguageModeling(processor)([row]) for row in ROWS]
    alone = torch.cat([Scorer(model).score(model, row).logps for row in rows])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
