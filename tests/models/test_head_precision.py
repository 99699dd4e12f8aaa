"""An output head in float32 on a model of lower precision."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_model
from trl.generation.vllm.weights import check_sendable
from trl.models.parts import cast_head_to_float32
from trl.models.scoring.causal import Scorer

ROWS = {
    "input_ids": torch.tensor([[5, 9, 3, 17, 30, 2]]),
    "labels": torch.tensor([[-100, -100, 3, 17, 30, 2]]),
    "position_ids": torch.arange(6)[None],
}


def scored(model, *, autocast=False):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return Scorer(model).score(model, ROWS).logps


@pytest.mark.parametrize("autocast", [False, True])
def test_log_probs_are_those_of_the_whole_head(autocast):
    """Hidden states stay in bfloat16; everything behind them is float32, also under autocast."""
    model = tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=False)
    before = scored(model)
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ROWS["input_ids"]).last_hidden_state[0]
    logits = hidden.float() @ model.lm_head.weight.float().T
    expected = logits.log_softmax(-1)[1:-1].gather(1, ROWS["labels"][0, 2:, None])[:, 0]
    cast_head_to_float32(model)
    assert model.lm_head.weight.dtype == torch.float32
    assert {part.dtype for part in model.get_decoder().parameters()} == {torch.bfloat16}
    torch.testing.assert_close(scored(model, autocast=autocast), expected, rtol=0, atol=1e-5)
    assert (before - expected).abs().max() > 1e-4
    torch.testing.assert_close(scored(copy.deepcopy(model)), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert model(input_ids=ROWS["input_ids"]).logits.dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_a_wide_head_stays_as_it_is_and_is_not_narrowed_by_autocast(tied):
    model = tiny_model("llama", dtype=torch.float32, tie_word_embeddings=tied)
    plain, narrow = scored(model), scored(model, autocast=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.get_decoder()(input_ids=ROWS["input_ids"]).last_hidden_state[0].float()
    logits = hidden @ model.lm_head.weight.T
    expected = logits.log_softmax(-1)[1:-1].gather(1, ROWS["labels"][0, 2:, None])[:, 0]
    cast_head_to_float32(model)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    assert model.config.tie_word_embeddings is tied
    torch.testing.assert_close(scored(model), plain, rtol=0, atol=0)
    torch.testing.assert_close(scored(model, autocast=True), expected, rtol=0, atol=1e-5)
    assert (narrow - expected).abs().max() > 1e-4


def test_a_head_that_is_the_input_embedding_gets_its_own_weights(tmp_path, caplog):
    model = tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ROWS["input_ids"]).last_hidden_state[0]
    logits = hidden.float() @ embedding.float().T
    expected = logits.log_softmax(-1)[1:-1].gather(1, ROWS["labels"][0, 2:, None])[:, 0]
    cast_head_to_float32(model)
    assert "cast_lm_head_to_fp32=True unties" in caplog.text
    torch.testing.assert_close(scored(model), expected, rtol=0, atol=1e-5)
    assert (model.lm_head.weight.dtype, embedding.dtype) == (torch.float32, torch.bfloat16)
    model.tie_weights()  # as accelerate calls it
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is not loaded.get_input_embeddings().weight


def test_an_untied_head_that_trains_cannot_be_sent_to_vllm():
    model = tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    cast_head_to_float32(model)
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32=True untied"):
        check_sendable(model)
    check_sendable(model.requires_grad_(False))
