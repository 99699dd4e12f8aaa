"""The variants of the benchmark do the same work: same losses, same gradients, same weights afterwards. No times."""

import copy

import pytest
import torch
from benchmarks.data import GSM8K, GSM8K_LENGTHS, Corpus, load_corpus, made_up_corpus
from benchmarks.measure import OURS, Measured, make_trainer, run_interleaved
from benchmarks.throughput import useful_flops
from benchmarks.variants import VARIANTS, Recipe, build_model
from torch import nn

from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return made_up_corpus(GSM8K_LENGTHS, max_length=64, rows=32, name="test")


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("first", [0, 8])
def test_loss_and_gradient_are_those_of_our_scoring(corpus: Corpus, variant: str, first: int) -> None:
    model = build_model("tiny", 5000)
    loop = VARIANTS[variant](model, Recipe(steps=2))
    rows = corpus.rows[first : first + 8]
    trainer = make_trainer(copy.deepcopy(model), corpus, Recipe(steps=2))
    assert isinstance(trainer.model, nn.Module)
    batch = trainer.data_collator(rows)
    count = trainer.method.count(batch)
    options = ScoreOptions(loss_of=lambda logps, _: -logps / count)
    ours = Scorer(trainer.model).score(trainer.model, batch, options).total
    assert ours is not None
    ours.backward()
    theirs = loop.loss(rows)
    theirs.backward()

    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for mine, other in zip(gradients(trainer.model), gradients(loop.model), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("turn", [1, 2])
def test_interleaved_run_gives_all_variants_the_same_batches(corpus: Corpus, turn: int) -> None:
    found = run_interleaved(build_model("tiny", 5000), corpus, Recipe(steps=4), warmup=2, turn=turn)

    losses = list(found.first_loss.values())
    assert max(losses) - min(losses) < 1e-5
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == dict.fromkeys(
        (OURS, "bare", "padded"), 2 // turn
    )
    assert len(found.batches) == 2
    assert found.real_tokens == sum(len(row["input_ids"]) for rows in found.batches for row in rows)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_losses_agree_under_autocast(corpus: Corpus, variant: str) -> None:
    recipe = Recipe(steps=2, autocast=True)
    model = build_model("tiny", 5000)
    loop = VARIANTS[variant](model, recipe)
    trainer = make_trainer(model, corpus, recipe)
    batch = trainer.data_collator(corpus.rows[:8])

    ours = trainer.compute_loss(model.train(), batch)

    with recipe.precision():
        theirs = loop.loss(corpus.rows[:8])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def test_ratio_is_the_median_of_the_steps_and_the_total_that_of_the_sums() -> None:
    found = Measured({OURS: [1.0, 1.0, 4.0], "bare": [1.0, 2.0, 1.0]})

    assert found.ratio("bare") == 1.0
    assert found.total_ratio("bare") == 1.5


def test_useful_operations_of_one_row_by_hand() -> None:
    config = build_model("tiny", 5000).config
    rows = [{"input_ids": [3, 4, 5], "completion_mask": [0, 1, 1]}]
    # width 64, two layers: q and o 64 x 64, k and v 64 x 32, three 64 x 176 in the feed-forward part
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176)
    attention = 2 * 2 * 3 * 3 * 64
    assert useful_flops(config, rows) == 3 * (2 * 3 * weights + attention + 2 * 2 * 64 * 5000)


def test_made_up_lengths_are_close_to_those_of_gsm8k() -> None:
    if not GSM8K.is_file():
        pytest.skip(f"{GSM8K} is not present on this machine")
    real = load_corpus(max_length=512)
    made_up = made_up_corpus(GSM8K_LENGTHS, max_length=512, rows=2000, name="test")

    def mean(rows: list[dict[str, list[int]]], name: str) -> float:
        return sum(len(row[name]) if name == "input_ids" else sum(row[name]) for row in rows) / len(rows)

    assert mean(made_up.rows, "input_ids") == pytest.approx(mean(real.rows, "input_ids"), rel=0.05)
    assert mean(made_up.rows, "completion_mask") == pytest.approx(mean(real.rows, "completion_mask"), rel=0.05)
