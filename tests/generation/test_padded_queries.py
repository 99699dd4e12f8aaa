"""`generate` and `batch_generation` on padded queries: responses and logits of each row by itself, whatever the batch."""

import pytest
import torch
from transformers import GenerationConfig

from tests.tiny import tiny_model
from trl.trainer.utils import batch_generation, forward, generate

PAD = 0
QUERIES = torch.tensor([[PAD, PAD, 5, 6], [7, 8, 9, 10], [PAD, 11, 12, 13]])


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
