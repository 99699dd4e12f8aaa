"""Lengths are drawn from the whole range, the same ones for the same seed."""

import numpy as np

from trl.generation.transformers.padded_queries import LengthSampler


def test_every_length_of_the_range_and_no_other_is_drawn():
    np.random.seed(0)
    sampler = LengthSampler(4, 8)
    drawn = [sampler() for _ in range(200)]
    assert set(drawn) == {4, 5, 6, 7}
    np.random.seed(0)
    assert [sampler() for _ in range(200)] == drawn
