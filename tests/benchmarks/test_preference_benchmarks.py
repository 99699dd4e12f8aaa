"""The variants of the preference benchmark do the same work: same losses, same gradients. No times."""

import copy
import json
from pathlib import Path

import pytest
import torch
from benchmarks.data import Corpus
from benchmarks.measure import OURS, run_interleaved
from benchmarks.pair_data import HARMLESS_LENGTHS, load_pairs, made_up_pairs, pair_row
from benchmarks.preference_loops import (
    TREE_ATTENTION,
    flatten,
    pad_sequences,
    padded_logps,
    reference_of,
    tree_logps,
)
from benchmarks.preference_tasks import TASKS
from benchmarks.prefix_sharing import time_sharing
from benchmarks.throughput import operations, tree_operations
from benchmarks.variants import Recipe, build_model
from torch import nn


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return made_up_pairs(HARMLESS_LENGTHS, max_length=64, rows=32, name="test")


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("variant", ["bare", "padded"])
@pytest.mark.parametrize("method", list(TASKS))
def test_loss_and_gradient_are_those_of_our_trainer(corpus: Corpus, method: str, variant: str) -> None:
    task, recipe = TASKS[method], Recipe(steps=2)
    model = task.build("tiny", 5000)
    loop = task.loops[variant](model, recipe)
    trainer = task.make(copy.deepcopy(model), task.rows(corpus), recipe)
    rows = [trainer.train_dataset[index] for index in range(8)]
    ours = trainer.compute_loss(trainer.model.train(), trainer.data_collator(rows))
    ours.backward()
    theirs = loop.loss(rows)
    theirs.backward()

    torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=1e-6)
    for mine, other in zip(gradients(trainer.model), gradients(loop.model), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", list(TASKS))
def test_interleaved_run_gives_all_variants_the_same_batches(corpus: Corpus, method: str) -> None:
    task = TASKS[method]
    found = run_interleaved(
        task.build("tiny", 5000),
        task.rows(corpus),
        Recipe(steps=3),
        warmup=1,
        loops=task.loops,
        make=task.make,
    )

    losses = list(found.first_loss.values())
    assert max(losses) - min(losses) < 1e-5
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == dict.fromkeys((OURS, "bare", "padded"), 2)
    assert [len(rows) for rows in found.batches] == [8, 8]


def test_mismatched_completions_of_the_rows_are_those_that_the_trainer_finds(corpus: Corpus) -> None:
    task = TASKS["kto"]
    rows = task.rows(corpus)
    without = [{name: row[name] for name in ("prompt_input_ids", "completion_input_ids", "label")} for row in rows.rows]
    trainer = task.make(task.build("tiny", 5000), Corpus(without, corpus.tokenizer, corpus.source), Recipe(steps=1))

    assert trainer.train_dataset["KL_completion_input_ids"][:] == [row["KL_completion_input_ids"] for row in rows.rows]


def test_tree_and_padded_rows_give_the_same_log_probs() -> None:
    model = reference_of(build_model("tiny", 5000))
    row = flatten([([5, 6, 7], [[8, 9], [10], [11, 12, 13]]), ([14], [[15]])])
    sequences = [([5, 6, 7], [8, 9]), ([5, 6, 7], [10]), ([5, 6, 7], [11, 12, 13]), ([14], [15])]
    padded = padded_logps(model, pad_sequences(sequences))
    model.set_attn_implementation(TREE_ATTENTION)
    torch.testing.assert_close(tree_logps(model, row), padded, rtol=0, atol=1e-4)


def test_prefix_sharing_does_the_same_work_with_fewer_operations() -> None:
    found = time_sharing(4, "tiny", 5000, steps=1)

    assert [len(seconds) for seconds in found.seconds.values()] == [1, 1]
    assert 0.5 < found.operations < 0.85


def test_operations_by_hand() -> None:
    config = build_model("tiny", 5000).config
    assert tree_operations(config, 3, [2, 1]) == operations(
        config, 6, pairs=4.5 + (3 * 2 + 2) + (3 * 1 + 0.5), scored=3
    )
    rows = [pair_row([3, 4, 5], [6], [7, 8])]
    needed, padded = TASKS["dpo"].operations(config, rows)
    assert needed == pytest.approx(4 / 3 * tree_operations(config, 3, [1, 2]))
    assert padded == pytest.approx(4 / 3 * 2 * operations(config, 5, pairs=25, scored=5))


def test_dialogues_are_split_at_the_last_answer_and_cut(tmp_path: Path) -> None:
    dialogue = "Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    lines = [
        {"chosen": dialogue + " yes", "rejected": dialogue + " no " * 40},
        {"chosen": dialogue + " other", "rejected": "Human: x\n\nAssistant: y"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    corpus = load_pairs(file, max_length=32)

    assert len(corpus.rows) == 1
    row = corpus.rows[0]
    assert corpus.tokenizer.decode(row["chosen_input_ids"]) == " yes<eos>"
    assert dialogue.endswith(corpus.tokenizer.decode(row["prompt_input_ids"]))
    assert len(row["rejected_input_ids"]) == 16 and len(row["prompt_input_ids"]) <= 16
