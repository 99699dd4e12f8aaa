"""Second completions behind prompts whose keys a first forward kept give what whole sequences give."""

import pytest
import torch
import torch.nn.functional as F

from tests.tiny import MIXTURES_OF_EXPERTS, tiny_model
from trl.collators.continuation import behind_prompts
from trl.collators.preference import completion_batch
from trl.collators.unpaired import single_completions
from trl.models import attention
from trl.models.attention import FLAT_MODEL_TYPES
from trl.models.forward import Scorer
from trl.models.kept_keys import KeptKeys, can_keep_keys
from trl.tensors.sequences import sum_by_sequence

# Lengths of prompt, own and other completion: prompts of one token have no token that is kept.
LENGTHS = ((5, 3, 2), (1, 2, 4), (7, 1, 3), (1, 1, 1))
EXACT = sorted(FLAT_MODEL_TYPES - set(MIXTURES_OF_EXPERTS))


def trees(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5)
    each = [[torch.randint(3, 60, (n,), generator=generator) for n in sizes] for sizes in lengths]
    return completion_batch([(prompt, [own, other]) for prompt, own, other in each], prefix_sharing=True)


def sums(scored, count):
    return sum_by_sequence(scored.logps, scored.positions.sequence, count)


def one_after_the_other(scorer, model, batch):
    """Log-probs of the first completions and, without gradient, of the second ones behind the kept prompts."""
    later = behind_prompts(batch)
    keys = KeptKeys(later.kept)
    first = scorer.score(model, {**single_completions(batch, 0, of=2), "past_key_values": keys})
    with torch.no_grad():
        second = scorer.score(model, {**later.batch, "past_key_values": keys})
    rows = len(batch["rows"])
    return sums(first, rows), sums(second, rows)


@pytest.mark.parametrize("architecture", [*EXACT, *MIXTURES_OF_EXPERTS])
def test_second_completions_have_the_log_probs_of_whole_sequences(architecture):
    exact = architecture in EXACT
    model = tiny_model(architecture, dtype=torch.float64 if exact else torch.float32)
    scorer, batch = Scorer(model), trees()
    expected = sums(scorer.score(model, batch), 8).view(4, 2)
    first, second = one_after_the_other(scorer, model, batch)
    tolerance = 1e-12 if exact else 2e-5
    assert first.tolist() == pytest.approx(expected[:, 0].tolist(), rel=tolerance)
    assert second.tolist() == pytest.approx(expected[:, 1].tolist(), rel=tolerance)
    # The first forward is the one without kept keys, to the bit, and so is its gradient.
    plain = sums(scorer.score(model, single_completions(batch, 0, of=2)), 4)
    assert torch.equal(first, plain)
    wanted, found = (
        torch.autograd.grad(part.sum(), model.get_input_embeddings().weight) for part in (plain, first)
    )
    assert torch.equal(wanted[0], found[0])


def test_a_sliding_window_reaches_back_into_the_prompt():
    model = tiny_model("mistral", dtype=torch.float64, sliding_window=4)
    scorer, batch = Scorer(model), trees(((6, 3, 5), (9, 1, 2), (2, 7, 6)))
    expected = sums(scorer.score(model, batch), 6).view(3, 2)
    _, second = one_after_the_other(scorer, model, batch)
    assert second.tolist() == pytest.approx(expected[:, 1].tolist(), rel=1e-12)


def test_the_kernel_of_variable_length(monkeypatch):
    """What a GPU's kernel is called with, on a stand-in that goes through the sequences one by one."""

    def kernel(
        query, key, value, queries, keys, longest_query, longest_key, *, scale, enable_gqa, window_size
    ):
        assert (longest_query, longest_key) == (queries.diff().max(), keys.diff().max())
        parts = []
        for number in range(len(queries) - 1):
            q = query[queries[number] : queries[number + 1]].transpose(0, 1)
            k, v = (part[keys[number] : keys[number + 1]].transpose(0, 1) for part in (key, value))
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
            parts.append(found.transpose(0, 1))
        return torch.cat(parts)

    model, batch = tiny_model("llama", dtype=torch.float64), trees()
    scorer = Scorer(model)
    expected = sums(scorer.score(model, batch), 8).view(4, 2)
    monkeypatch.setattr(attention, "_takes_variable_length", lambda *_: True)
    monkeypatch.setattr(attention, "_variable_length_kernel", lambda: kernel)
    assert sums(scorer.score(model, batch), 8).tolist() == pytest.approx(
        expected.flatten().tolist(), rel=1e-12
    )
    _, second = one_after_the_other(scorer, model, batch)
    assert second.tolist() == pytest.approx(expected[:, 1].tolist(), rel=1e-12)


def test_when_keys_cannot_be_kept():
    def can(architecture="gpt2", *, training=True, noise=None, checkpointed=False, **overrides):
        model = tiny_model(architecture, **overrides).train(training)
        if checkpointed:
            model.gradient_checkpointing_enable()
        scorer = Scorer(model)
        scorer.neftune_alpha = noise
        return can_keep_keys(scorer)

    assert can() and can("llama")
    assert not can("bloom") and not can("bloom", training=False)
    for reason in (
        {"resid_pdrop": 0.1},
        {"architecture": "llama", "attention_dropout": 0.1},
        {"architecture": "opt", "layerdrop": 0.1},
        {"architecture": "mixtral", "router_jitter_noise": 0.1},
        {"noise": 5.0},
        {"checkpointed": True},
    ):
        assert not can(**reason), reason
        assert can(**reason, training=False), reason


def test_trees_need_our_attention():
    """Flash attention that the user chose finds sequences by their positions: a second branch would see the first."""
    model = tiny_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    scorer = Scorer(model)
    assert scorer.flat and not scorer.takes_trees and not can_keep_keys(scorer)
