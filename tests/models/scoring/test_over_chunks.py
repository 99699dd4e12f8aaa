"""Losses over whole distributions, chunk by chunk, are those of the full logits, and so are all gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import SOFT_CAPPED, tiny_model, tiny_seq2seq
from trl.collators.preference import completion_batch, seq2seq_batch
from trl.models.scoring import causal
from trl.models.scoring.causal import Scorer
from trl.models.scoring.encoder_decoder import language_scorer
from trl.tensors.vocabulary_loss import vocabulary_loss

PROMPTED = [([5, 9, 3], [[7, 8, 6], [9]]), ([4, 4], [[3, 2, 1, 7], [6, 9]])]
WEIGHTS = torch.linspace(0.5, 2.0, 10, dtype=torch.float64)


def model(architecture, **options):
    return tiny_model(architecture, dtype=torch.float64, **options)


def adapted():
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    return get_peft_model(model("llama", tie_word_embeddings=False), config).double()


def divergence(logits, others, rows):
    """Generalised Jensen-Shannon, 0.3 and 0.7, of each token, weighted."""
    p, q = logits.log_softmax(-1), others.log_softmax(-1)
    m = (0.3 * p.exp() + 0.7 * q.exp()).log()
    return WEIGHTS[rows] * (0.3 * (p.exp() * (p - m)) + 0.7 * (q.exp() * (q - m))).sum(-1)


def entropy(logits, others, rows):
    assert others is None
    return -WEIGHTS[rows] * (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def full_logits(model, temperature):
    """The logits `(K, V)` that predict completions, of each sequence alone."""
    found = []
    for prompt, completions in PROMPTED:
        for completion in completions:
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
            found.append(logits[len(prompt) - 1 : -1] / temperature)
    return torch.cat(found)


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.requires_grad}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    def chunked(*args, **settings):
        return vocabulary_loss(*args, **settings, chunk_size=4)

    monkeypatch.setattr(causal, "vocabulary_loss", chunked)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("other", ["qwen3", "bloom", None])
@pytest.mark.parametrize("policy", ["gpt2", "gemma2", "cohere", "adapted", "bloom"])
def test_a_divergence_of_two_models_is_that_of_their_full_logits(policy, other, temperature):
    student = adapted() if policy == "adapted" else model(policy)
    teacher = None if other is None else model(other, **({"n_layer": 1} if other == "bloom" else {"hidden_size": 24}))
    loss_of = entropy if teacher is None else divergence
    batch = completion_batch(PROMPTED, prefix_sharing=True)
    others = None if teacher is None else full_logits(teacher, temperature).detach()
    expected = loss_of(full_logits(student, temperature), others, slice(None))
    wanted = gradients(student, expected.sum() * 3)

    pair = None if teacher is None else (Scorer(teacher), teacher.train())
    found = Scorer(student).over_chunks(student, batch, loss_of, other=pair, temperature=temperature)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if policy in SOFT_CAPPED else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(found.values, expected.detach(), **tolerance)
    torch.testing.assert_close(found.total, expected.sum(), **tolerance)
    own = gradients(student, found.total * 3)
    for name, gradient in wanted.items():
        # norms and rotations compute in float32: a last bit of float64 may turn one of theirs
        size = 1.0 if gradient is None else gradient.abs().max().clamp(min=1e-2)
        assert gradient is own[name] or (own[name] - gradient).abs().max() <= 1e-5 * size, name
    if teacher is not None:
        assert all(x.grad is None for x in teacher.parameters()) and teacher.training


def test_no_chunk_has_more_rows_than_asked_and_none_is_kept():
    student, teacher, seen = model("llama"), model("gpt2"), []

    def loss_of(logits, others, rows):
        seen.append((len(logits), len(others), rows.start, others.requires_grad))
        return divergence(logits, others, rows)

    batch = completion_batch(PROMPTED, prefix_sharing=True)
    found = Scorer(student).over_chunks(student, batch, loss_of, other=(Scorer(teacher), teacher))
    assert seen == [(4, 4, 0, False), (4, 4, 4, False), (2, 2, 8, False)]
    found.total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward once"):
        found.total.backward()
    with torch.no_grad():
        again = Scorer(student).over_chunks(student, batch, loss_of, other=(Scorer(teacher), teacher))
    assert not again.total.requires_grad and torch.equal(again.values, found.values)
    with pytest.raises(ValueError, match="loss_of"):
        Scorer(student).over_chunks(student, batch, lambda logits, others, rows: logits)


def test_encoder_decoders():
    student, teacher = (tiny_seq2seq(name, dtype=torch.float64) for name in ("t5", "bart"))
    rows = [
        {"prompt_input_ids": prompt, **dict(zip("ab", completions, strict=True))} for prompt, completions in PROMPTED
    ]
    batch = seq2seq_batch(rows, pad_token_id=0, completions=("a", "b"))
    scorers = [language_scorer(each) for each in (student, teacher)]
    found = scorers[0].over_chunks(student, batch, divergence, other=(scorers[1], teacher))
    logits = [
        scorer.score_with_logits(each, batch)[1][batch["decoder_labels"] != -100]
        for scorer, each in zip(scorers, (student, teacher), strict=True)
    ]
    expected = divergence(logits[0], logits[1].detach(), slice(None))
    torch.testing.assert_close(found.values, expected.detach(), rtol=1e-10, atol=1e-12)
    wanted = gradients(student, expected.sum())
    own = gradients(student, found.total)
    for name, gradient in wanted.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
