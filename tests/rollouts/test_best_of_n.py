"""The best of several completions, by any scores."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import tiny_model, tiny_seq2seq
from tests.tiny_tokenizers import tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from trl.core import LengthSampler
from trl.extras.best_of_n_sampler import BestOfNSampler

TOKENIZER = tiny_tokenizer()
QUERIES = [TOKENIZER(text)["input_ids"] for text in ("What colour", "Look up. Next", "The")]


def model_of(kind="llama", **fields):
    return tiny_model(kind, vocab_size=len(TOKENIZER), eos_token_id=None, **fields)


class Scores:
    """Scores texts by their number of a letter, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, texts):
        self.asked.append(list(texts))
        return [float(text.count("e")) for text in texts]


def sampler(model, *, lengths=(6, 7), **options):
    scores = Scores()
    options = {"seed": 1, "sample_size": 5, **options}
    return BestOfNSampler(model, TOKENIZER, scores, LengthSampler(*lengths), **options), scores


@pytest.mark.parametrize("n_candidates", [1, 3])
def test_the_best_are_returned_best_first(n_candidates):
    best, scores = sampler(model_of(), n_candidates=n_candidates)
    found = best.generate(QUERIES)
    assert [len(texts) for texts in found] == [n_candidates] * 3
    assert [len(asked) for asked in scores.asked] == [5, 5, 5]
    for query, texts, asked in zip(QUERIES, found, scores.asked, strict=True):
        assert all(text.startswith(TOKENIZER.decode(query)) for text in asked)
        counts = sorted((text.count("e") for text in asked), reverse=True)
        assert [text.count("e") for text in texts] == counts[:n_candidates]
        assert len(set(asked)) > 1


def test_forms_of_queries():
    model = model_of()
    forms = [
        QUERIES[0], torch.tensor(QUERIES[0]), torch.tensor([QUERIES[0]]), [QUERIES[0]], [torch.tensor(QUERIES[0])],
    ]  # fmt: skip
    found = [sampler(model)[0].generate(form) for form in forms]
    assert found == [found[0]] * 5
    assert len(found[0]) == 1


def test_seeds_and_lengths():
    model = model_of()
    first, again, other = (sampler(model, seed=seed)[0] for seed in (1, 1, 2))
    state = torch.get_rng_state()
    one, two = first.generate(QUERIES), first.generate(QUERIES)
    assert (one, two) == (again.generate(QUERIES), again.generate(QUERIES))
    assert one != two and one != other.generate(QUERIES)
    assert torch.equal(torch.get_rng_state(), state)
    whole, scores = sampler(model, lengths=(20, 21))
    whole.generate(QUERIES)
    short, cut = sampler(model, lengths=(4, 20))  # shorter ones begin like the longest
    short.generate(QUERIES)
    for texts, shorter in zip(scores.asked, cut.asked, strict=True):
        assert all(text.startswith(part.rstrip("\ufffd")) for text, part in zip(texts, shorter, strict=True))
    assert len({len(TOKENIZER(asked[0])["input_ids"]) for asked in cut.asked}) > 1


def test_adapters_value_heads_and_encoder_decoders():
    base = model_of()
    found = sampler(base)[0].generate(QUERIES)
    assert sampler(AutoModelForCausalLMWithValueHead.from_pretrained(base))[0].generate(QUERIES) == found
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=True))
    assert sampler(adapted)[0].generate(QUERIES) == found
    seq2seq = tiny_seq2seq("t5", vocab_size=len(TOKENIZER))
    best, scores = sampler(AutoModelForSeq2SeqLMWithValueHead.from_pretrained(seq2seq))
    best.generate(QUERIES)
    assert not any(text.startswith("What colour") for text in scores.asked[0])


def test_bad_input():
    with pytest.raises(ValueError, match=r"n_candidates .*got 5"):
        sampler(model_of(), sample_size=4, n_candidates=5)
    for scores, message in [
        (lambda texts: [1.0], "queries_to_scores gave 1 values, expected 5"),
        (lambda texts: [1.0] * 4 + [float("nan")], "gave nan for text 4, expected a finite number"),
        (lambda texts: [None, *[1.0] * 4], "gave None for text 0"),
        (lambda texts: None, "gave None .*expected a list of 5 numbers"),
    ]:
        best = BestOfNSampler(model_of(), TOKENIZER, scores, LengthSampler(3, 4), sample_size=5)
        with pytest.raises(ValueError, match=message):
            best.generate(QUERIES)
    assert best.generate([]) == []
    with pytest.raises(ValueError, match="num_beams=2, which rollouts do not support"):
        sampler(model_of())[0].generate(QUERIES, num_beams=2)
