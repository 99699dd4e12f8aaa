import math

import pytest
import torch

from trl.objectives.language_modelling import LOSS_TYPES, dft, nll
from trl.options.checks import lookup
from trl.tensors.reduce import count_units, reduce_terms

PROBABILITIES = [0.5, 0.25, 0.9]
MASK = torch.tensor([1, 1, 0])


def logps():
    return torch.tensor(PROBABILITIES, dtype=torch.float64).log().requires_grad_()


def test_nll_by_hand():
    leaf = logps()
    terms = nll(leaf, MASK)
    assert terms.per == "token" and count_units(terms).item() == 2
    loss = reduce_terms(terms, 2)
    assert loss.item() == pytest.approx((math.log(2) + math.log(4)) / 2)
    loss.backward()
    assert leaf.grad.tolist() == [-0.5, -0.5, 0.0]


def test_dft_by_hand():
    leaf = logps()
    terms = dft(leaf, MASK)
    assert terms.per == "token" and count_units(terms).item() == 2
    loss = reduce_terms(terms, 2)
    assert loss.item() == pytest.approx((0.5 * math.log(2) + 0.25 * math.log(4)) / 2)
    loss.backward()
    assert leaf.grad.tolist() == pytest.approx([-0.25, -0.125, 0.0])


def test_impossible_untrained_tokens_do_not_leak():
    for name in LOSS_TYPES:
        leaf = torch.tensor([-1.0, -math.inf], requires_grad=True)
        loss = reduce_terms(lookup(LOSS_TYPES, name, "loss_type")(leaf, torch.tensor([1, 0])), 1)
        loss.backward()
        assert math.isfinite(loss.item()) and torch.isfinite(leaf.grad).all()


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown loss_type 'ddft'; known are 'dft', 'nll'. Did you mean dft\?"):
        lookup(LOSS_TYPES, "ddft", "loss_type")
    with pytest.raises(ValueError, match="Use one of these"):
        lookup(LOSS_TYPES, "", "loss_type")


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"logps and mask must have one shape, got \(3,\), \(2,\)"):
        nll(logps(), MASK[:2])
