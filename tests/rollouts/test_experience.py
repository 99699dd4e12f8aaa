"""Experience: columns follow their rows through taking, joining and files, and the batch scores what they run along."""

from dataclasses import replace

import pytest
import torch

from tests.tiny import tiny_model
from trl.models.scoring.causal import Scorer
from trl.rollouts.experience import Experience, concatenate, load_rollout_batch, save_rollout_batch
from trl.tensors.ragged import Ragged

PROMPTS = [[5, 6], [7], [5, 6], [5, 6], [8, 9, 10]]
COMPLETIONS = [[11, 12], [13], [14, 15, 16], [17], [18, 19]]


def experience():
    completions = Ragged.of(COMPLETIONS)
    return Experience(
        Ragged.of(PROMPTS),
        completions,
        {"token": completions.values * 10, "logps": torch.randn(9, dtype=torch.float64)},
        {"row": torch.arange(5)},
    )


def test_columns_go_with_their_rows():
    taken = experience().take(torch.tensor([4, 2, 0]))
    assert [row.tolist() for row in taken.prompts.split()] == [PROMPTS[4], PROMPTS[2], PROMPTS[0]]
    assert [row.tolist() for row in taken.completions.split()] == [
        COMPLETIONS[4],
        COMPLETIONS[2],
        COMPLETIONS[0],
    ]
    assert torch.equal(taken.per_token["token"], taken.completions.values * 10)
    assert taken.per_row["row"].tolist() == [4, 2, 0]
    assert taken.ragged("token").padded().tolist() == [[180, 190, 0], [140, 150, 160], [110, 120, 0]]


@pytest.mark.parametrize("shared", [True, False])
def test_scored_tokens_are_the_completions_in_order(shared):
    found = experience().take(torch.tensor([1, 0, 2, 3, 4]))
    batch = found.as_batch(prefix_sharing=shared)
    scorer = Scorer(tiny_model("gpt2"))
    positions = scorer.score(scorer.core, batch).positions
    assert torch.equal(positions.target, found.completions.values)
    assert torch.equal(positions.sequence, found.completions.row_index)
    tokens = sum(map(len, PROMPTS)) + sum(map(len, COMPLETIONS))
    assert batch["input_ids"].numel() == (tokens - 2 * 2 if shared else tokens)  # three rows share a prompt of two


def test_columns_of_another_length():
    with pytest.raises(ValueError, match="'x' must have 9 numbers"):
        experience().with_tokens(x=torch.zeros(5))
    with pytest.raises(ValueError, match="must have 5 numbers"):
        experience().with_rows(x=torch.zeros(9))


def same(one, other):
    return one.state().keys() == other.state().keys() and all(
        torch.equal(value, other.state()[name]) and value.dtype == other.state()[name].dtype
        for name, value in one.state().items()
    )


def test_only_like_rollouts_are_joined():
    one = experience()
    with pytest.raises(ValueError, match=r"the same columns"):
        concatenate([one, replace(one, per_token={})])


def test_files_keep_every_bit_and_are_shared_out_anew(tmp_path):
    whole, facts = experience().take(torch.tensor([0, 1, 2, 3])), {"window": 3, "rows": 4}
    halves = [whole.take(torch.tensor(rows)) for rows in ([0, 1], [2, 3])]
    for rank, half in enumerate(halves):
        save_rollout_batch(tmp_path, half, rank=rank, facts=facts)
    for rank, half in enumerate(halves):
        assert same(load_rollout_batch(tmp_path, rank=rank, processes=2, facts=facts), half)
    assert same(load_rollout_batch(tmp_path, rank=0, processes=1, facts=facts), whole)
    assert same(concatenate(halves), whole)
    quarter = load_rollout_batch(tmp_path, rank=3, processes=4, facts=facts)
    assert same(quarter, whole.take(torch.tensor([3])))


def test_files_that_do_not_fit(tmp_path):
    assert load_rollout_batch(tmp_path, rank=0, processes=1, facts={}) is None
    save_rollout_batch(tmp_path, experience(), rank=0, facts={"window": 1})
    assert load_rollout_batch(tmp_path, rank=0, processes=1, facts={"window": 2}) is None
    assert load_rollout_batch(tmp_path, rank=0, processes=2, facts={"window": 1}) is None  # five rows, two processes
    save_rollout_batch(tmp_path, experience(), rank=2, facts={"window": 1})  # of three files one is missing
    assert load_rollout_batch(tmp_path, rank=0, processes=1, facts={"window": 1}) is None
