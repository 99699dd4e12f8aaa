"""The scoring forward of vision-language models gives their own logits' log-probs and gradients, also under LoRA."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny_vision import FAMILIES, QWEN, qwen_batch, qwen_model, tiny_image, tiny_processor, tiny_vision_model
from trl.collators.images import DataCollatorForVisionLanguageModeling
from trl.models.packed import inner_row
from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions
from trl.tensors.segments import Segments

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


@pytest.fixture
def packed_rows(monkeypatch):
    """The numbers of tokens of the packed rows that decoders run on."""
    numbers, from_lengths = [], Segments.from_lengths
    monkeypatch.setattr(
        inner_row.Segments, "from_lengths", lambda rows: numbers.append(sum(rows)) or from_lengths(rows)
    )
    return numbers


def check_same_as_padded(model, batch, *, tolerance=1e-10):
    """Log-probs and gradients of the decoder without padding are those of padded rows."""
    padded = copy.deepcopy(model)
    results = []
    for side, packed in ((model, None), (padded, False)):
        logps = Scorer(side, packed=packed).score(side, batch).logps
        results.append((logps.detach(), gradients(side, logps.sum())))
    (logps, found), (expected_logps, expected) = results
    torch.testing.assert_close(logps, expected_logps, rtol=tolerance, atol=tolerance)
    assert found.keys() == expected.keys()
    for part, gradient in expected.items():
        assert (found[part] - gradient).abs().max() <= tolerance * max(1.0, float(gradient.abs().max())), part


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_the_decoder_runs_on_real_tokens_only(family, checkpointing, packed_rows, caplog):
    """docs/methods/sft.md says where it does not: Gemma 3 gives it masks by which tokens of an image see each other."""
    name, processor, batch = family
    inner_row._warn.cache_clear()
    model = tiny_vision_model(processor, name, dtype=torch.float64).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert Scorer(model).fallbacks == []
    check_same_as_padded(model, batch)
    if name == "gemma3":
        assert packed_rows == [] and "Gemma3TextModel runs on padded rows" in caplog.text
        return
    assert set(packed_rows) == {int(batch["attention_mask"].sum())} and caplog.text == ""
    assert packed_rows[0] < batch["attention_mask"].numel(), "there is padding"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", sorted(QWEN))
def test_positions_with_three_axes_and_features_of_later_layers(model_type, side, packed_rows):
    """Qwen's positions `(3, B, T)` count images; Qwen3-VL adds features to layers; Qwen3.5 has linear attention."""
    batch = qwen_batch(side)
    # Linear attention computes in float32.
    check_same_as_padded(qwen_model(model_type), batch, tolerance=1e-5 if model_type == "qwen3_5" else 1e-10)
    assert packed_rows == [26]


def test_a_decoder_that_is_given_more_than_tokens_keeps_its_padding(packed_rows, caplog):
    inner_row._warn.cache_clear()
    decoder = qwen_model("qwen2_5_vl").get_decoder()
    Scorer(qwen_model("qwen2_5_vl"))
    assert inner_row._before(decoder, (), {
        "attention_mask": torch.ones(1, 3), "inputs_embeds": torch.ones(1, 3, 4), "use_cache": False, "depth": torch.ones(3),
    }) is None  # fmt: skip
    assert packed_rows == [] and "runs on padded rows, because the model around it gives it depth" in caplog.text


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
