"""The mixture's distribution is the normalised geometric mean, and generation from it is `generate`."""

import pytest
import torch

from tests.tiny import tiny_model
from trl.models.geometric_mixture import GeometricMixtureWrapper

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
GREEDY = {
    "attention_mask": torch.ones_like(IDS),
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
}


@pytest.fixture
def models():
    return tiny_model("llama"), tiny_model("llama", seed=1)


def mixture(models, coefficient):
    return GeometricMixtureWrapper(*models, models[0].generation_config, mixture_coef=coefficient)


def test_log_probs_are_those_of_the_normalised_product(models):
    logits = mixture(models, 0.25)(input_ids=IDS).logits
    p, q = (model(input_ids=IDS).logits.softmax(-1) for model in models)
    product = p**0.75 * q**0.25
    torch.testing.assert_close(logits.exp(), product / product.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("coefficient", "which"), [(0.0, 0), (1.0, 1)])
def test_at_the_ends_it_is_one_of_the_two(models, coefficient, which):
    found = mixture(models, coefficient).generate(input_ids=IDS, **GREEDY)
    assert torch.equal(found, models[which].generate(input_ids=IDS, **GREEDY))


def test_greedy_tokens_are_the_most_likely_of_the_mixture(models):
    model = mixture(models, 0.5)
    found = model.generate(input_ids=IDS, **GREEDY)
    assert torch.equal(model(input_ids=found[:, :-1]).logits[:, 3:].argmax(-1), found[:, 4:])


def test_a_coefficient_outside_its_range_is_an_error(models):
    with pytest.raises(ValueError, match="mixture_coef must be in"):
        mixture(models, 1.5)
