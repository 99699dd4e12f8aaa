import pytest
import torch

from trl.collators.preference import pack_prefix_groups
from trl.tensors.segments import Segments


def test_two_prefix_groups_by_hand():
    packed = pack_prefix_groups([([5, 6, 7], [[8, 9], [3]]), ([4], [[2, 1]])])
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 9, 3, 4, 2, 1]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2]]
    assert packed["labels"].tolist() == [[-100, -100, -100, 8, 9, 3, -100, 2, 1]]
    assert Segments(packed["segment_table"]).rows == Segments.from_prefix_groups([(3, [2, 1]), (1, [2])]).rows
    assert packed["scored_source"].tolist() == [2, 3, 2, 6, 7]
    assert packed["scored_target"].tolist() == [8, 9, 3, 2, 1]
    assert packed["scored_sequence"].tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("seed", range(2))
def test_each_token_is_predicted_by_the_one_before_it_in_its_own_sequence(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def tokens() -> list[int]:
        return [draw(3, 90) for _ in range(draw(1, 8))]

    rows = [(tokens(), [tokens() for _ in range(draw(1, 5))]) for _ in range(draw(1, 5))]
    packed = pack_prefix_groups(rows)
    ids, positions = packed["input_ids"][0], packed["position_ids"][0]
    source, target, sequence = (packed[f"scored_{name}"] for name in ("source", "target", "sequence"))
    sequences = [(prompt, branch) for prompt, branches in rows for branch in branches]
    assert sequence.max() + 1 == len(sequences)
    for index, (prompt, branch) in enumerate(sequences):
        own = sequence == index
        whole = [*prompt, *branch]
        assert target[own].tolist() == branch
        assert ids[source[own]].tolist() == whole[len(prompt) - 1 : -1]
        assert positions[source[own]].tolist() == list(range(len(prompt) - 1, len(whole) - 1))
    assert (packed["labels"] != -100).sum() == len(target)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least 1 row"),
        ([([1], [[2]]), ([], [[2]])], r"row 1 of the batch has sequences of \[0, 1\] tokens"),
        ([([1], [[2], []])], r"row 0 of the batch has sequences of \[1, 1, 0\] tokens"),
    ],
)
def test_prefix_groups_without_tokens_are_refused(rows, message: str):
    with pytest.raises(ValueError, match=message):
        pack_prefix_groups(rows)
