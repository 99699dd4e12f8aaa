"""Padded queries: responses, logits and rewards of each row equal those without padding."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from tests.tiny import tiny_classifier, tiny_model
from trl.trainer.utils import batch_generation, forward, generate, get_reward

PAD = 0
QUERIES = torch.tensor([[PAD, PAD, 5, 6], [7, 8, 9, 10], [PAD, 11, 12, 13]])


PAIRS = QUERIES[:2]
ROWS = torch.cat([PAIRS, torch.tensor([[11, 12, PAD], [13, PAD, PAD]])], dim=1)
REAL = [[5, 6, 11, 12], [7, 8, 9, 10, 13]]


def model():
    return tiny_model("llama", dtype=torch.float64, initializer_range=0.3).eval()


def greedy(**settings):
    return GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, **settings)


def test_responses_and_logits_are_those_of_the_model_on_what_it_wrote():
    found, logits = generate(model(), QUERIES, PAD, greedy())
    assert torch.equal(found[:, :4], QUERIES) and logits.shape[:2] == (3, 6)
    assert torch.equal(found[:, 4:], logits.argmax(dim=-1))
    expected = forward(model(), found, PAD).logits[:, 3:-1]
    torch.testing.assert_close(logits, expected.float(), rtol=0, atol=1e-5)  # transformers keeps 32 bits


def test_logits_are_divided_by_the_temperature_and_cut():
    torch.manual_seed(0)
    settings = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=0.5, top_k=4, eos_token_id=None)
    found, logits = generate(model(), QUERIES, PAD, settings)
    own = forward(model(), found, PAD).logits[:, 3:-1] / 0.5
    kept = logits.isfinite()
    assert (kept.sum(dim=-1) == 4).all()
    torch.testing.assert_close(logits[kept], own[kept].float(), rtol=0, atol=1e-5)
    assert kept.gather(-1, found[:, 4:, None]).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_batches_are_padded_to_the_longest_response(rows):
    whole, _ = generate(model(), QUERIES, PAD, greedy())
    stop = int(whole[0, 6])  # the first row ends with its third token
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=stop)
    found, logits = batch_generation(model(), QUERIES, rows, PAD, config)
    expected, own = generate(model(), QUERIES, PAD, config)
    assert torch.equal(found, expected) and found[0, 7:].eq(PAD).all()
    assert logits.shape[:2] == (3, 6)
    real = expected[:, 4:] != PAD
    torch.testing.assert_close(logits[real], own[real], rtol=0, atol=1e-5)
    assert not logits[0, 3:].any() or rows > 1  # by itself it is shorter


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_logits_are_those_of_rows_without_padding(architecture):
    model = tiny_model(architecture, dtype=torch.float64).eval()
    found = forward(model, ROWS, PAD)
    for row, ids in enumerate(REAL):
        alone = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(found.logits[row][ROWS[row] != PAD], alone, rtol=0, atol=1e-10)
    assert found.hidden_states[-1].shape == (2, 7, model.config.hidden_size)


def test_a_model_that_takes_no_positions():
    model = tiny_model("bloom", dtype=torch.float64).eval()
    rows = ROWS[1:]  # transformers (5.19) gives NaN for Bloom's rows with padding on the left
    alone = model(torch.tensor([REAL[1]])).logits[0]
    torch.testing.assert_close(forward(model, rows, PAD).logits[rows != PAD], alone, rtol=0, atol=1e-10)


def test_a_pad_token_that_the_model_does_not_have():
    model = tiny_model("llama", dtype=torch.float64).eval()
    expected = forward(model, ROWS, PAD).logits
    rows = ROWS.masked_fill(ROWS == PAD, 10_000)
    assert torch.equal(forward(model, rows, 10_000).logits[rows != 10_000], expected[ROWS != PAD])


@pytest.mark.parametrize("adapted", [False, True])
def test_rewards_are_those_of_the_last_token(adapted):
    model = tiny_classifier("llama", num_labels=1, dtype=torch.float64).eval()
    plain = [model(torch.tensor([ids])).logits.squeeze() for ids in REAL]
    if adapted:  # a new adapter adds nothing
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).eval()
    logits, rewards, last = get_reward(model, ROWS, PAD, PAIRS.shape[1])
    assert logits.shape == (2, 7, 1) and last.tolist() == [5, 4]
    torch.testing.assert_close(rewards, torch.stack(plain), rtol=0, atol=1e-10)
    torch.testing.assert_close(rewards, logits[torch.arange(2), last, 0], rtol=0, atol=0)


def test_whole_and_empty_responses():
    model = tiny_classifier("llama", num_labels=1, dtype=torch.float64).eval()
    rows = torch.cat([PAIRS, torch.tensor([[11, 12, 13], [PAD, PAD, PAD]])], dim=1)
    assert get_reward(model, rows, PAD, 4)[2].tolist() == [6, 3]


def test_a_language_model_has_no_rewards():
    with pytest.raises(TypeError, match="layer `score`, got LlamaForCausalLM"):
        get_reward(tiny_model("llama"), ROWS, PAD, 4)
