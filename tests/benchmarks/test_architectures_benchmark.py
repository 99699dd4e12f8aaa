"""Packed and padded steps do the same work: `compare` raises where their losses differ. No times."""

from benchmarks.architectures import sft_case
from benchmarks.data import LengthLaw, made_up_corpus


def test_packed_and_padded_steps_are_compared():
    law = LengthLaw(prompt=(6.0, 0.3), completion=(8.0, 0.4))
    result = sft_case("lfm2", made_up_corpus(law, max_length=32, rows=24, name="test"), 1)
    assert result is not None and result["gain"] > 0
    assert [len(side) for side in result["steps"]] == [1, 1]
