"""The choice of tokens: sums that a GPU makes when it is to be deterministic (the draws are in test_engine_contract)."""

import pytest
import torch

from trl.generation.transformers.choosing import _sums_by_blocks, running_sums


@pytest.mark.parametrize("width", [1, 255, 256, 257, 1024, 70_000])
def test_sums_by_blocks_are_running_sums(width):
    generator = torch.Generator().manual_seed(width)
    values = torch.rand(3, width, generator=generator, dtype=torch.float64) ** 8
    values[1, width // 2 :] = 0
    torch.testing.assert_close(_sums_by_blocks(values), running_sums(values), rtol=1e-13, atol=0)
    ones = torch.ones(1, width, dtype=torch.float64)
    assert torch.equal(_sums_by_blocks(ones)[0], torch.arange(1, width + 1, dtype=torch.float64))
