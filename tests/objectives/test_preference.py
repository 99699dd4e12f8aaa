import math

import pytest
import torch

from tests.objectives.pair_cases import gradients, one_pair, s, scores_of, tensor
from trl.objectives.pairs import PairOptions, PairScores, step_statistics
from trl.objectives.preference import (
    PAIR_LOSSES,
    check_losses,
    chosen_nll,
    nll_coefficient,
    preference_terms,
)
from trl.tensors.reduce import count_units, reduce_terms

# One pair with c = 2 and r = 1, beta = 0.5: h = 1, rewards 1 and 0.5, beta h = 0.5; label smoothing 0.1.
SMOOTH = 0.1
BY_HAND = {
    "sigmoid": -0.9 * math.log(s(0.5)) - 0.1 * math.log(s(-0.5)),
    "hinge": 0.5,  # 1 - 0.5
    "ipo": 0.0,  # (1 - 1 / (2 * 0.5))^2
    "exo_pair": s(0.5) * math.log(s(0.5) / 0.9) + s(-0.5) * math.log(s(-0.5) / 0.1),
    "nca_pair": -math.log(s(1)) - 0.5 * math.log(s(-1)) - 0.5 * math.log(s(-0.5)),
    "robust": (-0.9 * math.log(s(0.5)) + 0.1 * math.log(s(-0.5))) / 0.8,
    "bco_pair": -2 * math.log(s(0.25)),  # delta = 0.75: rewards 0.25 above and 0.25 below it
    "sppo_hard": (2 - 1) ** 2 + (1 + 1) ** 2,
    "aot": -0.9 * math.log(s(0.5)) - 0.1 * math.log(s(-0.5)),
    "aot_pair": -0.9 * math.log(s(0.5)) - 0.1 * math.log(s(-0.5)),
    "apo_zero": 1 - s(1) + s(0.5),
    "apo_down": s(1) + 1 - s(0.5),
    "discopop": (1 - s(2.5)) * -math.log(s(0.5)) + s(2.5) * math.exp(-0.5),  # tau = 0.2: 0.5 / 0.2 = 2.5
    "sft": 0.0,
}
OPTIONS = PairOptions(beta=0.5, label_smoothing=SMOOTH, discopop_tau=0.2)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_values_by_hand(name):
    assert PAIR_LOSSES[name].values(one_pair(2.0, 1.0), OPTIONS).tolist() == pytest.approx([BY_HAND[name]], abs=1e-14)


@pytest.mark.parametrize("name", sorted(set(PAIR_LOSSES) - {"sft", "ipo", "sppo_hard", "apo_down", "discopop"}))
def test_chosen_goes_up_and_rejected_goes_down(name):
    scores = one_pair(0.2, 0.1)
    chosen, rejected = gradients(PAIR_LOSSES[name].values(scores, PairOptions(beta=0.5)), scores)
    assert chosen < 0 < rejected


@pytest.mark.parametrize(
    ("name", "chosen_sign", "rejected_sign"), [("ipo", -1, 1), ("sppo_hard", -1, 1), ("ipo", 1, -1)]
)
def test_squares_pull_towards_their_goal(name, chosen_sign, rejected_sign):
    far = 20.0 if chosen_sign > 0 else 0.0  # beyond the goal of 1 / (2 beta) = 5, or before it
    scores = one_pair(far, 0.0)
    chosen, rejected = gradients(PAIR_LOSSES[name].values(scores, PairOptions(beta=0.1)), scores)
    assert math.copysign(1, chosen) == chosen_sign and math.copysign(1, rejected) == rejected_sign


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("gap", [3000.0, -3000.0])
def test_huge_margins_are_finite(name, gap, dtype):
    chosen = torch.tensor([gap], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([-gap], dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, dtype=dtype)
    for options in (PairOptions(beta=1.0, label_smoothing=0.1), PairOptions(beta=1.0, discopop_tau=4.0)):
        scores = PairScores(chosen, rejected, zero, zero)
        values = PAIR_LOSSES[name].values(scores, options)
        assert values.dtype == dtype and torch.isfinite(values).all()
        assert all(math.isfinite(part) for part in gradients(values, scores))


@pytest.mark.parametrize("name", sorted(set(PAIR_LOSSES) - {"ipo", "sppo_hard", "sft"}))
def test_at_beta_zero_nothing_is_learnt(name):
    """Every loss is then a constant: -log s(0) = log 2, and so on."""
    constant = {
        "hinge": 1.0,
        "exo_pair": 0.5 * math.log(0.5 / 0.999) + 0.5 * math.log(0.5 / 0.001),
        "nca_pair": 2 * math.log(2),
        "bco_pair": 2 * math.log(2),
        "apo_zero": 1.0,
        "apo_down": 1.0,
        "discopop": 0.5 * math.log(2) + 0.5,
    }
    scores = scores_of()
    values = PAIR_LOSSES[name].values(scores, PairOptions(beta=0.0))
    assert values.tolist() == pytest.approx([constant.get(name, math.log(2))] * 3)
    assert gradients(values, scores) == (0.0, 0.0)


def test_robust_dpo_is_unbiased_under_label_noise():
    """(1 - e) of the loss as labelled plus e of the loss with labels flipped is DPO's loss on clean labels."""
    options, noise = PairOptions(beta=0.5, label_smoothing=0.2), 0.2
    there, back = (PAIR_LOSSES["robust"].values(pair, options) for pair in (one_pair(2.0, 1.0), one_pair(1.0, 2.0)))
    assert ((1 - noise) * there + noise * back).item() == pytest.approx(-math.log(s(0.5)))


def test_exo_takes_a_thousandth_for_no_smoothing():
    given = PAIR_LOSSES["exo_pair"].values(scores_of(), PairOptions(label_smoothing=1e-3))
    torch.testing.assert_close(PAIR_LOSSES["exo_pair"].values(scores_of(), PairOptions()), given)


# Closed forms ----------------------------------------------------------------------------------------------


# Losses that look at the whole step ------------------------------------------------------------------------


def sorted_loss(left, right, beta):
    return -torch.nn.functional.logsigmoid(beta * (left.sort().values - right.sort().values)).sum()


def test_aot_compares_sorted_margins():
    scores = scores_of()
    found = PAIR_LOSSES["aot"].values(scores, PairOptions(beta=0.5)).sum()
    expected = sorted_loss(scores.chosen - scores.rejected, scores.ref_chosen - scores.ref_rejected, 0.5)
    assert_same_with_gradients(found, expected, scores)


def test_aot_pair_compares_sorted_log_ratios():
    scores = scores_of()
    found = PAIR_LOSSES["aot_pair"].values(scores, PairOptions(beta=0.5)).sum()
    expected = sorted_loss(scores.chosen - scores.ref_chosen, scores.rejected - scores.ref_rejected, 0.5)
    assert_same_with_gradients(found, expected, scores)


def assert_same_with_gradients(found, expected, scores):
    assert found.item() == pytest.approx(expected.item(), abs=1e-13)
    leaves = (scores.chosen, scores.rejected)
    for got, want in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["aot", "aot_pair", "bco_pair"])
def test_with_the_steps_statistics_a_cut_step_is_a_whole_one(name):
    whole, options = scores_of(), PairOptions(beta=0.5)
    values = PAIR_LOSSES[name].values(whole, options)
    step = step_statistics(whole, options.beta)
    parts = [
        PAIR_LOSSES[name].values(
            PairScores(
                whole.chosen[part],
                whole.rejected[part],
                whole.ref_chosen[part],
                whole.ref_rejected[part],
                step.rows(part),
            ),
            options,
        )
        for part in (slice(0, 1), slice(1, 3))
    ]
    cut = torch.cat(parts)
    torch.testing.assert_close(cut, values, rtol=0, atol=0)
    assert gradients(cut, whole) == gradients(values, whole)


def test_delta_is_the_mean_reward():
    """0.5 * (2 - 1 + 0.5 + 1 + 3 - 4) / 6 = 0.125."""
    step = step_statistics(scores_of(), beta=0.5)
    assert step.delta.item() == pytest.approx(0.125) and not step.margin_partner.requires_grad


# Mixtures --------------------------------------------------------------------------------------------------


def test_metrics_by_their_documented_names():
    terms = preference_terms(scores_of(), ["sigmoid"], PairOptions(beta=0.5))
    assert terms.per == "pair" and count_units(terms).item() == 3
    means = {name: metric.mean.item() for name, metric in terms.metrics.items()}
    assert means == pytest.approx(
        {
            "rewards/chosen": 0.25,  # 0.5 * (2 - 1 + 0.5) / 3
            "rewards/rejected": 0.0,
            "rewards/accuracies": 2 / 3,  # 2 > 1, -1 < 3, 0.5 > -4
            "rewards/margins": 0.25,
            "logps/chosen": (-8 - 21 - 4.5) / 3,
            "logps/rejected": (-11 - 5 - 10) / 3,
        }
    )
    assert not any(metric.total.requires_grad for metric in terms.metrics.values())


def test_a_mixture_is_the_weighted_sum():
    options, names = PairOptions(beta=0.5), ["sigmoid", "bco_pair", "sft"]
    parts = [PAIR_LOSSES[name].values(scores_of(), options) for name in names]
    mixed = preference_terms(scores_of(), names, options, loss_weights=[0.8, 0.2, 1.0])
    torch.testing.assert_close(mixed.values, 0.8 * parts[0] + 0.2 * parts[1])
    torch.testing.assert_close(preference_terms(scores_of(), names, options).values, sum(parts))
    assert mixed.metrics["rewards/chosen"].mean.item() == pytest.approx(2.0 * 0.25)  # weights add to 2


def test_pair_weights_scale_values_and_not_the_count():
    weights = tensor([1.0, 0.5, 0.0])
    plain = preference_terms(scores_of(), ["hinge"], PairOptions(beta=0.5))
    scaled = preference_terms(scores_of(), ["hinge"], PairOptions(beta=0.5), pair_weights=weights)
    torch.testing.assert_close(scaled.values, plain.values * weights)
    assert count_units(scaled).item() == 3


def test_rewards_may_be_logged_from_other_scores():
    free = PairScores.without_reference(*(tensor(x) for x in ([-8.0], [-11.0])))
    terms = preference_terms(free, ["sigmoid"], PairOptions(beta=0.5), logged=one_pair(2.0, 1.0))
    assert terms.values.item() == pytest.approx(-math.log(s(1.5)))  # 0.5 * (-8 + 11)
    assert terms.metrics["rewards/chosen"].mean.item() == pytest.approx(1.0)


def test_chosen_likelihood_is_a_mean_over_tokens():
    """Tokens of 1 and 3 nats, the rejected one left out: 0.5 * (1 + 3) / 2 in the loss, 2 as logged."""
    logps = tensor([-1.0, -3.0, -50.0], grad=True)
    terms = chosen_nll(logps, torch.tensor([1, 1, 0]), coefficient=0.5)
    assert terms.per == "token"
    loss = reduce_terms(terms, count_units(terms))
    assert loss.item() == pytest.approx(1.0) and terms.metrics["nll_loss"].mean.item() == pytest.approx(2.0)
    assert torch.autograd.grad(loss, logps)[0].tolist() == [-0.25, -0.25, 0.0]


def test_a_likelihood_without_weight_is_nothing():
    terms = chosen_nll(tensor([-math.inf], grad=True), torch.tensor([1]), coefficient=0.0)
    assert reduce_terms(terms, 1).item() == 0.0 and terms.metrics["nll_loss"].mean.item() == 0.0


def test_weight_of_the_likelihood():
    assert nll_coefficient(["sigmoid"]) == 0.0
    assert nll_coefficient(["sft"]) == 1.0
    assert nll_coefficient(["sigmoid"], rpo_alpha=0.3) == 0.3


# Errors ----------------------------------------------------------------------------------------------------


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown loss_type 'sigmod'; known are 'aot'.*Did you mean sigmoid\?"):
        check_losses(["sigmod"], None, PairOptions())


@pytest.mark.parametrize(
    ("losses", "weights", "options", "message"),
    [
        ([], None, {}, "loss_type must name at least 1 loss"),
        (["sigmoid"], [math.nan], {}, "must be finite numbers"),
        (["sigmoid"], None, {"f_divergence": "kl"}, "unknown f_divergence_type 'kl'"),
        (["sigmoid", "ipo"], [1.0], {}, "loss_weights must be 2"),
        (["ipo"], None, {"beta": 0.0}, "beta must be > 0 for loss_type 'ipo', got 0"),
        (["sppo_hard"], None, {"beta": 0.0}, "beta must be > 0 for loss_type 'sppo_hard'"),
        (["aot"], None, {"f_divergence": "js_divergence"}, "loss_type 'aot'. Use 'reverse_kl'"),
    ],
)
def test_what_does_not_go_together(losses, weights, options, message):
    with pytest.raises(ValueError, match=message):
        check_losses(losses, weights, PairOptions(**options))


def test_sppo_and_hinge_at_another_beta():
    """beta = 0.25: the goal of SPPO is 2; a margin of 8 is beyond the hinge."""
    options = PairOptions(beta=0.25)
    assert PAIR_LOSSES["sppo_hard"].values(one_pair(3.0, 1.0), options).item() == pytest.approx(1 + 9)
    assert PAIR_LOSSES["hinge"].values(one_pair(9.0, 1.0), options).item() == 0.0
