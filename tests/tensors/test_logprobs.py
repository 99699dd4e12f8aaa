"""The scoring primitive against plain logits: values, gradients, precision, memory."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl.tensors import logprobs
from trl.tensors.logprobs import token_scores
from trl.tensors.softmax_rows import LogitRule, Statistics

RULES = {
    "plain": LogitRule(),
    "scale": LogitRule(scale=0.25),
    "temperature": LogitRule(temperature=0.7),
    "cap": LogitRule(soft_cap=2.0),
    "all": LogitRule(scale=1.5, soft_cap=3.0, temperature=0.8),
}
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-10}


def inputs(count=13, width=8, vocabulary=37, *, dtype=torch.float64, bias=True, seed=0):
    """Hidden states, weight, targets, bias; leaves that need a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    targets = torch.randint(vocabulary, (count,), generator=generator)
    return leaf(count, width), leaf(vocabulary, width), targets, leaf(vocabulary) if bias else None


def plain_logits(hidden, weight, bias, rule):
    logits = F.linear(hidden, weight, bias) * rule.scale
    if rule.soft_cap is not None:
        logits = rule.soft_cap * torch.tanh(logits / rule.soft_cap)
    return logits / rule.temperature


def plain_scores(hidden, weight, targets, bias, rule):
    logits = plain_logits(hidden, weight, bias, rule)
    logps = logits.log_softmax(dim=-1)
    entropies = -(logps.exp() * logps).sum(dim=-1)
    return logps.gather(1, targets[:, None]).squeeze(1), entropies, logits.argmax(dim=-1) == targets


def mixed(logps, entropies):
    """A loss that pulls differently at every token, and on the entropies where they are given."""
    weights = torch.linspace(-1.0, 2.0, len(logps), dtype=logps.dtype)
    loss = (weights * logps).sum()
    return loss if entropies is None else loss + (weights.flip(0) * entropies).sum()


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, [x for x in leaves if x is not None])


def assert_close(ours, theirs, tolerance):
    scale = max(theirs.abs().max().item(), 1.0) if theirs.numel() else 1.0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "recompute"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", RULES)
def test_equals_plain_logits(monkeypatch, name, dtype, keep):
    monkeypatch.setattr(logprobs, "KEEP_BYTES", 2**26 if keep else 0)
    rule, tolerance = RULES[name], TOLERANCES[dtype]
    for with_bias, entropy, chunk_size in product([True, False], [True, False], [1, 5, 13, None]):
        hidden, weight, targets, bias = inputs(dtype=dtype, bias=with_bias)
        wide = [None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
        logps, entropies, correct = plain_scores(wide[0], wide[1], targets, wide[2], rule)
        expected = gradients(mixed(logps, entropies if entropy else None), *wide)
        scores = token_scores(
            hidden,
            weight,
            targets,
            bias=bias,
            rule=rule,
            wanted=Statistics(entropy=entropy, correct=True),
            chunk_size=chunk_size,
        )
        assert scores.logps.dtype == dtype
        assert_close(scores.logps.double(), logps, tolerance)
        assert scores.correct.tolist() == correct.tolist()
        assert (scores.entropies is not None) == entropy
        if entropy:
            assert_close(scores.entropies.double(), entropies, tolerance)
        found = gradients(mixed(scores.logps, scores.entropies), hidden, weight, bias)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == dtype
            assert_close(ours.double(), theirs, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", RULES)
def test_collisions_and_mean_logits_equal_plain_ones_and_change_nothing_else(name, dtype):
    rule, tolerance = RULES[name], TOLERANCES[dtype]
    wanted = Statistics(entropy=True, correct=True, collision=True, mean_logit=True)
    for chunk_size in (1, 5, None):
        hidden, weight, targets, bias = inputs(dtype=dtype)
        logits = plain_logits(hidden.detach().double(), weight.double(), bias.double(), rule)
        scores = token_scores(hidden, weight, targets, bias=bias, rule=rule, wanted=wanted, chunk_size=chunk_size)
        collisions = (2 * logits.log_softmax(dim=-1)).logsumexp(dim=-1)
        assert_close(scores.log_collision.double(), collisions, tolerance)
        assert_close(scores.mean_logits.double(), (logits * rule.temperature).mean(dim=-1), tolerance)
        assert not scores.log_collision.requires_grad
        assert not scores.mean_logits.requires_grad
        plain = token_scores(
            hidden,
            weight,
            targets,
            bias=bias,
            rule=rule,
            wanted=Statistics(entropy=True),
            chunk_size=chunk_size,
        )
        assert torch.equal(scores.logps, plain.logps)
        both = [gradients(mixed(x.logps, x.entropies), hidden, weight, bias) for x in (scores, plain)]
        assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


def test_gradient_of_entropies_alone():
    hidden, weight, targets, _ = inputs(bias=False)
    entropies = plain_scores(hidden, weight, targets, None, LogitRule())[1]
    scores = token_scores(hidden, weight, targets, wanted=Statistics(entropy=True), chunk_size=4)
    for ours, theirs in zip(
        gradients(scores.entropies.sum(), hidden, weight),
        gradients(entropies.sum(), hidden, weight),
        strict=True,
    ):
        assert_close(ours, theirs, 1e-10)


def test_no_rows():
    hidden, weight, targets, bias = inputs(0)
    scores = token_scores(hidden, weight, targets, bias=bias, wanted=Statistics(entropy=True, correct=True))
    assert [tuple(x.shape) for x in scores[:3]] == [(0,)] * 3
    for gradient in gradients(scores.logps.sum(), hidden, weight, bias):
        assert gradient.abs().sum() == 0


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "recompute"])
def test_a_frozen_head_gets_no_gradient_and_costs_no_product_for_it(monkeypatch, keep):
    monkeypatch.setattr(logprobs, "KEEP_BYTES", 2**26 if keep else 0)
    hidden, weight, targets, bias = inputs()
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    scores = token_scores(hidden, weight, targets, bias=bias)
    with LargestTensor() as seen:
        scores.logps.sum().backward()
    assert hidden.grad is not None and weight.grad is None and bias.grad is None
    assert ("addmm_" in seen.names) is False
    expected = plain_scores(hidden, weight, targets, bias, LogitRule())[0].sum()
    assert_close(hidden.grad, gradients(expected, hidden)[0], 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float64(dtype):
    hidden, weight, targets, bias = inputs(64, 32, 101, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logps, entropies, _ = plain_scores(wide[0], wide[1], targets, wide[2], LogitRule())
    scores = token_scores(
        hidden, weight, targets, bias=bias, wanted=Statistics(entropy=True, correct=True), chunk_size=10
    )
    assert (scores.entropies - entropies).abs().max() < 0.05
    assert scores.logps.dtype == torch.float32
    # Products of size ~20 carry 8 (bf16) or 11 (fp16) bits.
    assert (scores.logps - logps).abs().max() < (0.15 if dtype == torch.bfloat16 else 0.02)
    found = gradients(mixed(scores.logps, None), hidden, weight, bias)
    expected = gradients(mixed(logps, None), *wide)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() / theirs.norm() < 0.05


def test_correct_follows_argmax_among_equal_half_precision_logits():
    hidden, weight = torch.ones(2, 1, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.bfloat16)
    scores = token_scores(hidden, weight, torch.tensor([0, 3]), wanted=Statistics(correct=True))
    assert scores.correct.tolist() == [True, False]


def test_autocast_runs_products_in_its_dtype_and_returns_gradients_in_the_inputs():
    hidden, weight, targets, bias = inputs(64, 32, 101, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = token_scores(hidden, weight, targets, bias=bias, chunk_size=10)
    exact = token_scores(hidden, weight, targets, bias=bias)
    error = (scores.logps - exact.logps).abs().max()
    assert 1e-4 < error < 0.3
    for ours, theirs in zip(
        gradients(scores.logps.sum(), hidden, weight, bias),
        gradients(exact.logps.sum(), hidden, weight, bias),
        strict=True,
    ):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() / theirs.norm() < 0.05


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_stay_finite(size):
    hidden, weight, targets, bias = inputs(4, 8, 6, dtype=torch.float32)
    with torch.no_grad():
        bias[2] = size
    targets[0], targets[1] = 2, 3
    scores = token_scores(hidden, weight, targets, bias=bias, wanted=Statistics(entropy=True))
    for found in (
        scores.logps,
        scores.entropies,
        *gradients(mixed(scores.logps, scores.entropies), hidden, weight, bias),
    ):
        assert torch.isfinite(found).all()
    assert scores.logps.min() < -9e3


def test_a_vocabulary_entry_that_is_switched_off():
    hidden, weight, _, bias = inputs(4, 8, 6)
    with torch.no_grad():
        bias[2] = float("-inf")
    scores = token_scores(hidden, weight, torch.tensor([0, 1, 3, 4]), bias=bias, wanted=Statistics(entropy=True))
    found = gradients(mixed(scores.logps, scores.entropies), hidden, weight, bias)
    assert all(torch.isfinite(x).all() for x in (*scores[:2], *found))
    assert found[1][2].abs().sum() == 0


def test_a_weight_whose_data_is_swapped_between_the_passes(monkeypatch):
    """DeepSpeed ZeRO-3 empties `.data` after the forward and gathers it again for the backward."""
    monkeypatch.setattr(logprobs, "KEEP_BYTES", 0)
    hidden, weight, targets, _ = inputs(bias=False)
    weight = torch.nn.Parameter(weight.detach())
    expected = gradients(token_scores(hidden, weight, targets).logps.sum(), hidden, weight)
    loss = token_scores(hidden, weight, targets).logps.sum()
    full, weight.data = weight.data, torch.empty(0, dtype=weight.dtype)
    weight.data = full.clone()
    for ours, theirs in zip(gradients(loss, hidden, weight), expected, strict=True):
        assert torch.equal(ours, theirs)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor, and the operators that ran."""

    def __init__(self):
        super().__init__()
        self.largest, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.__name__.split(".")[0])
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "recompute"])
@pytest.mark.parametrize("entropy", [True, False])
def test_never_builds_tokens_times_vocabulary(monkeypatch, entropy, keep):
    monkeypatch.setattr(logprobs, "KEEP_BYTES", 2**26 if keep else 0)
    hidden, weight, targets, bias = inputs(60, 8, 50)
    with LargestTensor() as seen:
        scores = token_scores(
            hidden,
            weight,
            targets,
            bias=bias,
            rule=RULES["all"],
            wanted=Statistics(entropy=entropy),
            chunk_size=10,
        )
        mixed(scores.logps, scores.entropies).backward()
    assert seen.largest <= 10 * 50
