"""Group policy losses: hand-worked values, slopes, special cases that are equal, and independence of how a step is cut."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from trl.objectives.group_policy import (
    LOSS_TYPES,
    GroupOptions,
    divisor_share,
    entropy_threshold,
    group_policy_loss,
    sequence_policy_loss,
    token_losses,
)
from trl.objectives.group_ratios import RATIOS, GroupTokens, RatioLevel
from trl.tensors.reduce import reduce_terms
from trl.tensors.sequences import sum_by_sequence

TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}
LENGTHS = [3, 1, 4, 2, 5, 3]
CASES = [(loss, level) for loss in LOSS_TYPES for level in get_args(RatioLevel) if (loss, level) != ("luspo", "token")]


def batch(lengths=LENGTHS, seed=0, masked=()):
    """A random micro-batch in float64: log-probs with gradient, and what is known of its tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    def normal(size):
        return torch.randn(size, dtype=torch.float64, generator=generator)

    total, rows = len(sequence), len(lengths)
    logps = (-2 + 0.4 * normal(total)).requires_grad_()
    mask = torch.ones(total, dtype=torch.float64)
    mask[torch.isin(sequence, torch.tensor(list(masked), dtype=torch.int64))] = 0
    tokens = GroupTokens(
        old_logps=logps.detach() + 0.3 * normal(total),
        advantages=normal(rows)[sequence],
        mask=mask,
        sequence=sequence,
        count=rows,
        ref_logps=logps.detach() + 0.3 * normal(total),
        correction=normal(total).exp(),
        chosen=normal(total) > -0.5,
    )
    return logps, tokens


def rows_of(logps, tokens, rows):
    """The micro-batch that some rows make."""
    rows = torch.tensor(rows)
    picked = torch.cat([(tokens.sequence == row).nonzero()[:, 0] for row in rows])
    places = torch.empty(tokens.count, dtype=torch.int64).index_put((rows,), torch.arange(len(rows)))
    columns = ("old_logps", "advantages", "mask", "ref_logps", "correction", "chosen")
    own = {name: None if (value := getattr(tokens, name)) is None else value[picked] for name in columns}
    return logps[picked], GroupTokens(sequence=places[tokens.sequence[picked]], count=len(rows), **own)


def step_loss(logps, tokens, options, parts):
    """Loss of one optimiser step that is cut into micro-batches of these rows."""
    share = {"rollout_tokens": 40, "rollout_rows": 12, "longest": 8}
    batches = [rows_of(logps, tokens, rows) for rows in parts]
    divisor = sum(divisor_share(options.loss_type, own.mask, own.count, **share) for _, own in batches)
    return sum(reduce_terms(group_policy_loss(part, own, options), divisor) for part, own in batches)


def gradient(loss, logps):
    return torch.autograd.grad(loss, logps, retain_graph=True)[0]


def one_token(loss_type, ratio, advantage, **options):
    """Loss of one token of a given ratio, and its slope over the log-prob."""
    logps = torch.tensor([math.log(ratio) - 1], dtype=torch.float64, requires_grad=True)
    old, advantages = (
        torch.full((1,), -1.0, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
    )
    tokens = GroupTokens(old, advantages, torch.ones(1), torch.tensor([0]), 1)
    terms = group_policy_loss(logps, tokens, GroupOptions(loss_type, **options))
    terms.values.sum().backward()
    return terms.values.item(), logps.grad.item()


# ---- values by hand


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),  # inside: epsilon_high is 0.3
        (1.5, 2.0, -2.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),  # went the wrong way: still pulled back
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (5.0, -2.0, 8.0, 0.0),  # delta 4
    ],
)
def test_the_clipped_losses_of_one_token(ratio, advantage, value, slope):
    options = {"epsilon": 0.2, "epsilon_high": 0.3, "delta": 4.0}
    assert one_token("dapo", ratio, advantage, **options) == pytest.approx((value, slope), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.5, 2.0, 1.5), (7.0, 2.0, 5.0), (7.0, -2.0, 5.0), (0.1, -2.0, 0.1)]
)
def test_cispo_weighs_the_likelihood_of_every_token(ratio, advantage, weight):
    value, slope = one_token("cispo", ratio, advantage, epsilon_high=5.0)
    assert value == pytest.approx(-weight * advantage * (math.log(ratio) - 1), abs=1e-12)
    assert slope == pytest.approx(-weight * advantage, abs=1e-12)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 0.8), (-2.0, 1.5), (0.0, 1.5)])
def test_sapo_closes_a_gate_smoothly(advantage, tau):
    value, slope = one_token("sapo", 3.0, advantage, sapo_temperature_pos=0.8, sapo_temperature_neg=1.5)
    gate = 1 / (1 + math.exp(-tau * 2))
    assert value == pytest.approx(-advantage * gate * 4 / tau, abs=1e-12)
    assert slope == pytest.approx(-advantage * 4 * gate * (1 - gate) * 3, abs=1e-12)
    if advantage:
        at_one = one_token("sapo", 1.0, advantage, sapo_temperature_pos=0.8, sapo_temperature_neg=1.5)
        assert at_one[1] == pytest.approx(-advantage, abs=1e-12)


@pytest.mark.parametrize(("advantage", "k", "decay"), [(2.0, 1.5, 0.5), (-2.0, 2.5, 0.25), (0.0, 2.5, 0.25)])
def test_vespo_weighs_a_sequence_by_a_kernel_of_the_product_of_its_ratios(advantage, k, decay):
    """Ratios 2, 1/2, 3 and of a masked token 7: W is 3 at each of the trained ones."""
    logps = torch.tensor([math.log(2.0), math.log(0.5), math.log(3.0), math.log(7.0)], dtype=torch.float64)
    logps.requires_grad_()
    advantages = torch.full((4,), advantage, dtype=torch.float64)
    tokens = GroupTokens(torch.zeros(4), advantages, torch.tensor([1, 1, 1, 0]), torch.zeros(4, dtype=torch.int64), 1)
    options = GroupOptions("vespo", vespo_k_pos=1.5, vespo_lambda_pos=0.5, vespo_k_neg=2.5, vespo_lambda_neg=0.25)
    terms = group_policy_loss(logps, tokens, options)
    weight = 3.0**k * math.exp(decay * (1 - 3.0))
    expected = [-weight * advantage * math.log(ratio) for ratio in (2.0, 0.5, 3.0)]
    assert terms.values.tolist()[:3] == pytest.approx(expected, abs=1e-12)
    assert gradient(reduce_terms(terms, 1), logps).tolist() == pytest.approx(
        [-weight * advantage] * 3 + [0.0], abs=1e-12
    )
    assert terms.metrics["vespo/phi_seq_mean"].mean.item() == pytest.approx(weight, abs=1e-12)


def test_means_of_four_loss_types_by_hand():
    """Rows of 1 and 3 tokens with losses -2 and 1 each, one of 4 rows of a window of 20 tokens; longest 5."""
    tokens = GroupTokens(
        torch.zeros(4), torch.tensor([2.0, -1.0, -1.0, -1.0]), torch.ones(4), torch.tensor([0, 1, 1, 1]), 2
    )
    expected = {
        "grpo": (-2 + 1) / 2,
        "bnpo": (-2 + 3) / 4,
        "dapo": (-2 + 3) / 10,
        "dr_grpo": (-2 + 3) / 10,
        "luspo": (-2 + 3) / 2,
    }
    for loss_type, value in expected.items():
        options = GroupOptions(loss_type, "sequence")
        share = divisor_share(loss_type, tokens.mask, 2, rollout_tokens=20, rollout_rows=4, longest=5)
        loss = reduce_terms(group_policy_loss(torch.zeros(4), tokens, options), share)
        assert loss.item() == pytest.approx(value), loss_type


def test_sequence_ratio_is_the_geometric_mean():
    logps = torch.tensor([math.log(2.0), math.log(8.0), 5.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([1, 1, 0])
    tokens = GroupTokens(torch.zeros(3), torch.ones(3), mask, torch.tensor([0, 0, 0]), 1)
    for level in ("sequence", "sequence_token"):
        found = RATIOS[level](logps, tokens)
        torch.testing.assert_close(found, torch.tensor([4.0, 4.0, 1.0], dtype=torch.float64), **TOLERANCE)
    shared = torch.autograd.grad(RATIOS["sequence"](logps, tokens)[0], logps)[0]
    own = torch.autograd.grad(RATIOS["sequence_token"](logps, tokens)[0], logps)[0]
    assert shared.tolist() == pytest.approx([2.0, 2.0, 0.0])
    assert own.tolist() == pytest.approx([4.0, 0.0, 0.0])


def test_divergence_is_k3_and_its_correction_multiplies_by_the_ratio():
    logps = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    quarter = torch.tensor([math.log(0.25)], dtype=torch.float64)
    tokens = GroupTokens(quarter, torch.zeros(1), torch.ones(1), torch.tensor([0]), 1, ref_logps=quarter)
    k3 = 0.5 - 1 + math.log(2)
    for corrected, factor in ((False, 1), (True, 2)):
        terms = group_policy_loss(logps, tokens, GroupOptions(beta=0.1, use_bias_correction_kl=corrected))
        assert terms.values.item() == pytest.approx(0.1 * factor * k3, abs=1e-12)
        assert terms.metrics["kl"].mean.item() == pytest.approx(factor * k3, abs=1e-12)
    slope = gradient(terms.values.sum(), logps).item()
    assert slope == pytest.approx(0.1 * 2 * math.log(2), abs=1e-12)  # r times log(p / p_ref): that of the divergence


def test_factors_weigh_the_surrogate_and_not_the_divergence():
    logps, tokens = batch()
    plain = replace(tokens, correction=None, chosen=None)
    options, penalty = GroupOptions("dapo"), GroupOptions("dapo", beta=0.3)
    surrogate = group_policy_loss(logps, plain, options).values
    divergence = group_policy_loss(logps, plain, penalty).values - surrogate
    found = group_policy_loss(logps, tokens, penalty).values
    torch.testing.assert_close(found, surrogate * tokens.chosen * tokens.correction + divergence, **TOLERANCE)


# ---- special cases


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_on_policy_every_loss_has_the_gradient_of_the_plain_policy_gradient(loss_type, level):
    logps, tokens = batch()
    tokens = replace(tokens, old_logps=logps.detach(), correction=None, chosen=None)
    terms = group_policy_loss(logps, tokens, GroupOptions(loss_type, level, epsilon_high=5.0))
    found = gradient(terms.values.sum(), logps)
    averaged = LOSS_TYPES[loss_type].over == "rows" and not LOSS_TYPES[loss_type].row_sums
    lengths = torch.tensor(LENGTHS)[tokens.sequence] if averaged else 1
    torch.testing.assert_close(found, -tokens.advantages / lengths, **TOLERANCE)


# ---- independence of the cut


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_loss_and_gradient_do_not_depend_on_how_a_step_is_cut(loss_type, level):
    logps, tokens = batch(masked=[3])
    options = GroupOptions(loss_type, level, beta=0.1, use_bias_correction_kl=True, delta=1.5)
    whole = step_loss(logps, tokens, options, [range(6)])
    for parts in ([[0, 1, 2], [3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 2], [0, 4, 1], [3]]):
        cut = step_loss(logps, tokens, options, [list(part) for part in parts])
        torch.testing.assert_close(cut, whole, **TOLERANCE)
        torch.testing.assert_close(gradient(cut, logps), gradient(whole, logps), **TOLERANCE)


@pytest.mark.parametrize("loss_type", [name for name, kind in LOSS_TYPES.items() if kind.ratios is None])
def test_losses_of_single_tokens_add_up_to_the_terms(loss_type):
    logps, tokens = batch(masked=[3])
    options = GroupOptions(loss_type, beta=0.1, delta=1.5)
    losses, terms = token_losses(tokens, options), group_policy_loss(logps, tokens, options)
    found = sum(losses(logps[part], part).sum() for part in (slice(0, 7), slice(7, 18)))
    expected = reduce_terms(terms, 1)
    torch.testing.assert_close(found.to(expected), expected, **TOLERANCE)
    torch.testing.assert_close(gradient(found, logps), gradient(expected, logps), **TOLERANCE)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
def test_the_steps_of_a_window_add_up_to_one_step_on_all_of_it(loss_type):
    """At the same weights: a batch of rollouts in 1, 2 or 3 optimiser steps (bnpo has the tokens of each step instead)."""
    logps, tokens = batch()
    options, share = (
        GroupOptions(loss_type, "sequence", beta=0.1),
        {"rollout_tokens": 18, "rollout_rows": 6, "longest": 8},
    )
    sums = []
    for steps in ([range(6)], [range(3), range(3, 6)], [[0, 1], [2, 3], [4, 5]]):
        cut = [rows_of(logps, tokens, list(rows)) for rows in steps]
        losses = [
            reduce_terms(group_policy_loss(part, own, options), divisor_share(loss_type, own.mask, own.count, **share))
            for part, own in cut
        ]
        sums.append(gradient(sum(losses) / len(losses), logps))
    for other in sums[1:]:
        torch.testing.assert_close(other, sums[0], **TOLERANCE)


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_what_is_masked_out_reaches_neither_loss_nor_gradient_nor_metrics(loss_type, level):
    logps, tokens = batch(masked=[2])
    options = GroupOptions(loss_type, level, beta=0.1)
    outside = tokens.mask == 0
    broken = logps.detach().clone()
    broken[outside] = math.nan
    broken.requires_grad_()
    worse = replace(
        tokens,
        old_logps=torch.where(outside, math.nan, tokens.old_logps),
        ref_logps=torch.where(outside, math.inf, tokens.ref_logps),
        correction=torch.where(outside, math.nan, tokens.correction),
    )
    entropies = torch.where(outside, math.nan, 1.0)
    expected = group_policy_loss(logps, tokens, options, entropies=entropies)
    found = group_policy_loss(broken, worse, options, entropies=entropies)
    torch.testing.assert_close(found.values, expected.values, **TOLERANCE)
    slopes = gradient(reduce_terms(found, 1), broken)
    assert (slopes[outside] == 0).all()
    torch.testing.assert_close(slopes, gradient(reduce_terms(expected, 1), logps), **TOLERANCE)
    assert {k: v.mean.item() for k, v in found.metrics.items()} == pytest.approx(
        {k: v.mean.item() for k, v in expected.metrics.items()}
    )


@pytest.mark.parametrize(("loss_type", "level"), CASES)
def test_tokens_masked_within_a_row_are_as_if_they_were_not_there(loss_type, level):
    """What a tool wrote counts in no row's mean and in no ratio of sequences."""
    logps, tokens = batch()
    kept = torch.ones(18, dtype=torch.bool)
    kept[[1, 5, 6, 13]] = False
    options = GroupOptions(loss_type, level, beta=0.1)
    columns = ("old_logps", "advantages", "mask", "sequence", "ref_logps", "correction", "chosen")
    fewer = GroupTokens(count=6, **{name: getattr(tokens, name)[kept] for name in columns})
    share = {"rollout_tokens": 40, "rollout_rows": 12, "longest": 8}
    slopes = []
    for part, own in ((logps, replace(tokens, mask=kept.double())), (logps[kept], fewer)):
        terms = group_policy_loss(part, own, options)
        slopes.append(gradient(reduce_terms(terms, divisor_share(loss_type, own.mask, 6, **share)), logps))
    torch.testing.assert_close(slopes[0], slopes[1], **TOLERANCE)
    assert slopes[0].abs().sum() > 0


def test_a_step_whose_completions_are_all_masked_is_a_loss_of_zero():
    logps, tokens = batch(masked=range(6))
    for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo"):
        loss = step_loss(logps, tokens, GroupOptions(loss_type, beta=0.1), [range(6)])
        assert loss.item() == 0
        assert (gradient(loss, logps) == 0).all()


def test_an_enormous_ratio_stays_finite():
    logps, tokens = batch()
    tokens = replace(tokens, old_logps=tokens.old_logps - 1e4, ref_logps=tokens.ref_logps + 1e4)
    for loss_type, level in CASES:
        loss = step_loss(logps, tokens, GroupOptions(loss_type, level, beta=0.1), [range(6)])
        assert loss.isfinite()
        assert gradient(loss, logps).isfinite().all()


# ---- metrics


def test_clip_shares_by_hand():
    ratios = torch.tensor([0.5, 0.5, 1.5, 1.5, 1.0])
    advantages = torch.tensor([-1.0, 1.0, 1.0, -1.0, 1.0])
    tokens = GroupTokens(torch.zeros(5), advantages, torch.ones(5), torch.arange(5), 5)
    entropies = torch.arange(5.0)
    found = group_policy_loss(ratios.log(), tokens, GroupOptions("dapo"), entropies=entropies).metrics
    assert {name: value.mean.item() for name, value in found.items()} == pytest.approx(
        {
            "clip_ratio/low_mean": 0.2,
            "clip_ratio/high_mean": 0.2,
            "clip_ratio/region_mean": 0.4,
            "entropy": 2.0,
        }
    )
    cispo = group_policy_loss(ratios.log(), tokens, GroupOptions("cispo", epsilon_high=1.2)).metrics
    assert {name: value.mean.item() for name, value in cispo.items()} == pytest.approx({"cispo_clip_ratio": 0.2})
    assert group_policy_loss(ratios.log(), tokens, GroupOptions("sapo")).metrics == {}


def test_a_clipped_sequence_counts_once():
    tokens = GroupTokens(torch.zeros(4), torch.ones(4), torch.ones(4), torch.tensor([0, 0, 0, 1]), 2)
    logps = torch.tensor([1.0, 1.0, 1.0, 0.0])
    by_level = [
        group_policy_loss(logps, tokens, GroupOptions("grpo", level)).metrics["clip_ratio/high_mean"].mean.item()
        for level in ("token", "sequence")
    ]
    assert by_level == [0.75, 0.5]


def test_the_threshold_is_a_quantile_of_what_is_trained():
    entropies = torch.randn(101, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).abs()
    mask = torch.ones(101)
    mask[50] = 0
    for top in (0.0, 0.2, 0.5, 1.0):
        expected = torch.quantile(entropies[mask != 0], 1 - top).item()
        assert entropy_threshold(entropies, mask, top).item() == pytest.approx(expected, rel=1e-12)
    assert (entropies >= entropy_threshold(entropies, mask, 1.0))[mask != 0].all()


def test_positions_of_one_context_are_chosen_together():
    five = torch.full((4,), 5.5728)
    five[3] = torch.nextafter(five[3], torch.tensor(0.0))  # the same number in another batch
    entropies = torch.cat([five, torch.tensor([6.0, 1.0, 2.0, 3.0])])
    chosen = entropies >= entropy_threshold(entropies, torch.ones(8), 0.5)
    assert chosen.tolist() == [True] * 5 + [False] * 3


# ---- RLOO


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_rloo_clips_the_probability_of_the_whole_completion(ratio, advantage, value, slope):
    logps = torch.tensor([math.log(ratio) - 1, 1.0], dtype=torch.float64, requires_grad=True)
    tokens = GroupTokens(torch.zeros(2), torch.full((2,), advantage), torch.ones(2), torch.tensor([0, 0]), 1)
    terms = sequence_policy_loss(logps, tokens, GroupOptions())
    assert terms.per == "sequence"
    assert terms.values.item() == pytest.approx(value)
    assert gradient(terms.values.sum(), logps).tolist() == pytest.approx([slope, slope])


def test_rloo_counts_clipped_sequences_and_does_not_depend_on_the_cut():
    logps, tokens = batch(masked=[3])
    whole = sequence_policy_loss(logps, tokens, GroupOptions(epsilon=0.1), entropies=torch.ones(18))
    cut = [
        sequence_policy_loss(*rows_of(logps, tokens, rows), GroupOptions(epsilon=0.1))
        for rows in ([4, 1], [0, 2, 3, 5])
    ]
    loss = sum(reduce_terms(part, 6) for part in cut)
    torch.testing.assert_close(loss, reduce_terms(whole, 6), **TOLERANCE)
    torch.testing.assert_close(gradient(loss, logps), gradient(reduce_terms(whole, 6), logps), **TOLERANCE)
    ratios = sum_by_sequence((logps.detach() - tokens.old_logps) * tokens.mask, tokens.sequence, 6).exp()
    row_advantages = torch.stack([tokens.advantages[tokens.sequence == row][0] for row in range(6)])
    low = ((ratios < 0.9) & (row_advantages < 0)).double().mean().item()
    high = ((ratios > 1.1) & (row_advantages > 0)).double().mean().item()
    assert low + high > 0
    found = {name: value.mean.item() for name, value in whole.metrics.items()}
    assert found == pytest.approx(
        {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "entropy": 1.0,
        }
    )


# ---- bad input


def kernels(loss_type, advantage):
    tokens = GroupTokens(torch.zeros(1), torch.tensor([advantage]), torch.ones(1), torch.tensor([0]), 1)
    options = GroupOptions(
        loss_type, sapo_temperature_pos=1.0, sapo_temperature_neg=2.0, vespo_k_pos=1.0, vespo_lambda_pos=0.5,
        vespo_k_neg=2.0, vespo_lambda_neg=1.0,
    )  # fmt: skip
    return group_policy_loss(torch.log(torch.tensor([2.0])), tokens, options).values.item()


def test_every_positive_advantage_has_the_settings_of_positive_ones():
    """Also one below 1. At a ratio of 2: SAPO's 4 s(1) and 2 s(2); VESPO's 2 exp(-1/2) and 4 exp(-1), times log 2."""
    assert kernels("sapo", 0.5) == pytest.approx(-0.5 * 4 / (1 + math.exp(-1)))
    assert kernels("sapo", -0.5) == pytest.approx(0.5 * 2 / (1 + math.exp(-2)))
    assert kernels("vespo", 0.5) == pytest.approx(-0.5 * 2 * math.exp(-0.5) * math.log(2), rel=1e-6)
    assert kernels("vespo", -0.5) == pytest.approx(0.5 * 4 * math.exp(-1) * math.log(2), rel=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_a_token_without_advantage_is_not_clipped(loss_type):
    tokens = GroupTokens(torch.zeros(2), torch.tensor([0.0, 1.0]), torch.ones(2), torch.tensor([0, 1]), 2)
    options = GroupOptions(loss_type, **({"epsilon_high": 1.5} if loss_type == "cispo" else {}))
    metrics = group_policy_loss(torch.log(torch.tensor([9.0, 9.0])), tokens, options).metrics
    shares = [value.mean.item() for name, value in metrics.items() if "ratio" in name]
    assert max(shares) == 0.5


def test_a_sequence_of_one_token_has_its_advantage():
    tokens = GroupTokens(torch.zeros(1), torch.tensor([2.0]), torch.ones(1), torch.tensor([0]), 1)
    assert sequence_policy_loss(torch.zeros(1), tokens, GroupOptions()).values.tolist() == [-2.0]


def test_weights_are_averaged_over_sequences_with_a_trained_token():
    mask, both = torch.tensor([1.0, 0.0]), torch.tensor([0, 1])
    tokens = GroupTokens(torch.zeros(2), torch.ones(2), mask, both, 2)
    found = group_policy_loss(torch.zeros(2), tokens, GroupOptions("vespo")).metrics["vespo/phi_seq_mean"]
    assert (found.total.item(), found.count.item()) == (1.0, 1.0)
