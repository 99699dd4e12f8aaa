import pytest
import torch

from trl.tensors.segments import Segments


def visible_in(row: Segments) -> torch.Tensor:
    """The definition as a bool matrix `(total, total)`: entry (q, k) says whether token q sees token k."""
    matrix = torch.zeros(row.total, row.total, dtype=torch.bool)
    for start, length, prefix_start, prefix_length in row.rows:
        rows = slice(start, start + length)
        matrix[rows, rows] = torch.ones(length, length, dtype=torch.bool).tril()
        matrix[rows, prefix_start : prefix_start + prefix_length] = True
    return matrix


def test_plain_sequences_by_hand():
    row = Segments.from_lengths([3, 1, 2])
    assert row.start.tolist() == [0, 3, 4]
    assert row.prefix_length.tolist() == [0, 0, 0]
    assert row.total == 6
    assert row.leaves == [0, 1, 2]
    assert row.position_ids().tolist() == [[0, 1, 2, 0, 0, 1]]


def test_prefix_groups_by_hand():
    row = Segments.from_prefix_groups([(3, [2, 1]), (2, []), (1, [2])])
    assert row.rows == [(0, 3, 0, 0), (3, 2, 0, 3), (5, 1, 0, 3), (6, 2, 0, 0), (8, 1, 0, 0), (9, 2, 8, 1)]
    assert row.position_ids().tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 0, 1, 2]]
    assert row.leaves == [1, 2, 3, 5]


def test_table_keeps_everything():
    row = Segments.from_prefix_groups([(4, [3, 1, 2]), (5, [])])
    table = row.table
    assert table.shape == (1, 1, 5, 4)
    assert table.dtype == torch.int64
    assert table[0, 0, 1].tolist() == [4, 3, 0, 4]
    again = Segments(table)
    assert again.rows == row.rows == [tuple(segment) for segment in table[0, 0].tolist()]
    assert (again.leaves, again.total) == (row.leaves, row.total) == ([1, 2, 3, 4], 15)
    assert torch.equal(again.position_ids(), row.position_ids())


@pytest.mark.parametrize("seed", range(10))
def test_each_branch_is_the_sequence_it_would_be_alone(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    groups = [(draw(1, 9), [draw(1, 7) for _ in range(draw(0, 5))]) for _ in range(draw(1, 6))]
    row = Segments.from_prefix_groups(groups)
    visible, positions = visible_in(row), row.position_ids()[0]
    assert row.total == sum(prompt + sum(branches) for prompt, branches in groups)
    for start, length, prefix_start, prefix_length in row.rows:
        own = [*range(prefix_start, prefix_start + prefix_length), *range(start, start + length)]
        assert positions[own].tolist() == list(range(len(own)))
        causal = torch.ones(len(own), len(own), dtype=torch.bool).tril()
        assert torch.equal(visible[own][:, own][prefix_length:], causal[prefix_length:])
        assert visible[start : start + length].sum() == causal[prefix_length:].sum()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 3, 0, 0), (4, 2, 0, 0)], "segment 1 must start at"),
        ([(0, 3, 0, 0), (3, 0, 0, 0)], "with tokens, got 3, 0"),
        ([(0, 3, 0, 0), (3, 2, 0, 2)], r"no earlier plain segment at 0"),
        ([(0, 2, 0, 0), (2, 2, 0, 2), (4, 2, 2, 2)], "segment 2 has no earlier plain segment"),
    ],
)
def test_what_is_no_row_is_refused(rows, message: str):
    with pytest.raises(ValueError, match=message):
        Segments(rows)
    with pytest.raises(ValueError, match=message):
        Segments(torch.tensor(rows))
