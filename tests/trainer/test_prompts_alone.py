"""Prompts that a student or teacher completes are tokenised by themselves, though a token of the row crosses their end."""

from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from tests.experimental.gold_runs import gold, other_tokenizer
from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.one_step import trainer_of
from trl import GKDConfig, GKDTrainer
from trl.models.packed.layout import TEACHER_BATCH

# " counted" and "colour" are tokens; the second prompt is within the first token of its row.
ROWS = [
    {"prompt": "The ferryman c", "completion": "ounted two wooden oars."},
    {"prompt": "c", "completion": "olour"},
    {"prompt": "The ferryma", "completion": "n"},  # with more tokens than the row
    {"prompt": "And then?", "completion": " Look up."},
]
PROMPTS = [row["prompt"] for row in ROWS]


def gkd(**settings: Any) -> Any:
    model = tiny_model("llama", vocab_size=400, dtype=torch.float64)
    teacher = tiny_model("gpt2", vocab_size=400, dtype=torch.float64)
    settings = {"lmbda": 1.0, "max_new_tokens": 4, "model": model, "teacher_model": teacher, **settings}
    settings.setdefault("train_dataset", Dataset.from_list(ROWS))
    return trainer_of(
        GKDTrainer,
        GKDConfig,
        None,
        {"per_device_train_batch_size": 4, **settings},
        processing_class=tiny_tokenizer(),
    )


def batches_of(trainer: Any) -> list[Any]:
    return trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))[0]


def texts_of(tokenizer: Any, batch: Any) -> list[str]:
    """The prompts of a padded batch, without the completions."""
    rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    return [tokenizer.decode(ids[(labels == -100) & (mask == 1)]) for ids, labels, mask in rows]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"seq_kd": True, "lmbda": 0.0},
        {"padding_free": True},
        {"streams": True},
    ],
    ids=str,
)
def test_prompts_of_gkd(settings):
    if settings.pop("streams", False):
        settings["train_dataset"] = IterableDataset.from_generator(lambda: iter(ROWS))
        settings["max_length"] = 64
    trainer = gkd(**settings)
    (batch,) = batches_of(trainer)
    found = texts_of(tiny_tokenizer(), trainer.scorer.padded_inputs(batch))
    assert sorted(found) == sorted(PROMPTS)
    trainer.train()
    trainer.evaluate(Dataset.from_list(ROWS))


def test_a_long_prompt_loses_its_beginning():
    tokenizer = tiny_tokenizer()
    row = {"prompt": "What colour is the sky? It is blue. The ferryman c", "completion": "ounted"}
    whole, alone = (tokenizer(text)["input_ids"] for text in (row["prompt"] + row["completion"], row["prompt"]))
    trainer = gkd(train_dataset=Dataset.from_list([row] * 4), max_length=len(whole) - 1)  # with an eos: two less
    (batch,) = batches_of(trainer)
    assert texts_of(tokenizer, trainer.scorer.padded_inputs(batch)) == [tokenizer.decode(alone[2:])] * 4


def test_the_rows_themselves_are_as_without_completions():
    rows, expected = gkd().train_dataset, gkd(lmbda=0.0).train_dataset
    assert expected.column_names == ["input_ids", "completion_mask"]
    assert rows.select_columns(expected.column_names).to_list() == expected.to_list()
    whole = gkd(train_dataset=Dataset.from_list(ROWS[3:]))
    assert whole.train_dataset.column_names == expected.column_names


@pytest.mark.parametrize("settings", [{"lmbda": 1.0}, {"lmbda": 0.0, "seq_kd": True}], ids=str)
def test_prompts_of_gold(settings):
    """Both sides read the whole prompt, each in its own tokens."""
    trainer = gold(train_dataset=Dataset.from_list(ROWS), per_device_train_batch_size=4, **settings)
    (batch,) = batches_of(trainer)
    for tokenizer, rows in ((tiny_tokenizer(), batch), (other_tokenizer(), batch[TEACHER_BATCH])):
        assert sorted(texts_of(tokenizer, rows)) == sorted(PROMPTS)
