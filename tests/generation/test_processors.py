"""Samplers that only transformers has, in our engine: its own `generate` and its processors are the oracles."""

import pytest
import torch
from transformers import TypicalLogitsWarper

from tests.generation.test_engine_contract import KINDS, ids_of, oracle, prompts_of
from tests.tiny import tiny_model, tiny_seq2seq
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine

GREEDY = {
    "ngrams": {"no_repeat_ngram_size": 1},
    "ngrams of the prompt": {"encoder_no_repeat_ngram_size": 1},
    "banned": {"bad_words_ids": [[28], [44, 0]], "suppress_tokens": [82], "begin_suppress_tokens": [2]},
    "bias and penalty": {"sequence_bias": [[[20], 3.0]], "repetition_penalty": 1.5},
    "decay": {"exponential_decay_length_penalty": (3, 1.5)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kwargs", GREEDY.values(), ids=GREEDY)
def test_greedy_completions_are_those_of_generate(kind, kwargs):
    """One prompt at a time in the oracle: transformers counts padding among a row's tokens."""
    model, prompts = tiny_model("llama", dtype=torch.float64), prompts_of((5, 9, 3), copies=2)
    sampling = Sampling(8, do_sample=False).updated(kwargs)
    found = ids_of(TransformersEngine(model, **KINDS[kind]).generate(prompts, sampling))
    expected = [oracle(model, [prompt], max_new_tokens=8, **kwargs)[0] for prompt in prompts]
    assert found == expected
    assert found != [oracle(model, [prompt], max_new_tokens=8)[0] for prompt in prompts]


def test_an_encoder_decoder():
    model, prompts = tiny_seq2seq("t5", dtype=torch.float64), prompts_of((5, 9), copies=2)
    kwargs = {"no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5}
    found = ids_of(TransformersEngine(model).generate(prompts, Sampling(6, do_sample=False).updated(kwargs)))
    for prompt, ids in zip(prompts, found, strict=True):
        expected = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=6, **kwargs)[0]
        assert ids == expected[1:].tolist()
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("kind", ["fused", "generate"])
def test_typical_sampling(kind):
    """Log-probs are those of transformers' processor over the model's logits, and with the kept mass the model's own."""
    model, prompts = tiny_model("llama", dtype=torch.float64), prompts_of((5, 9), copies=20)
    sampling = Sampling(4, temperature=0.8, stop_token_ids=(), seed=3).updated({"typical_p": 0.4})
    engine = TransformersEngine(model, **KINDS[kind])
    found = engine.generate(prompts, sampling)
    warper, close = (
        TypicalLogitsWarper(0.4),
        {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False},
    )  # `generate` gives float32
    for prompt, one in zip(prompts, found, strict=True):
        logits = model(input_ids=torch.tensor([prompt + one.ids])).logits[0, len(prompt) - 1 : -1] / 0.8
        own, ids = logits.log_softmax(-1), torch.tensor(one.ids)[:, None]
        typical = warper(None, logits).log_softmax(-1)
        torch.testing.assert_close(one.logps, typical.gather(1, ids)[:, 0], **close)
        torch.testing.assert_close(one.logps + one.kept, own.gather(1, ids)[:, 0], **close)
    alone = engine.generate(prompts[7:8], sampling, streams=[7])
    assert alone[0].ids == found[7].ids  # whatever else is in the batch
