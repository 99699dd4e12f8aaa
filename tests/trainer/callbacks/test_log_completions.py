"""Completions are those of greedy generation, are tabled when due, and leave training alone."""

import pandas as pd
import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig

from tests.models.words import word_tokenizer
from tests.trainer.callbacks.runs import PROMPTS, prompt_dataset, trainer
from trl.models.chat_setup import ChatMlSpecialTokens
from trl.trainer.callbacks import LogCompletionsCallback
from trl.trainer.samples import prompt_ids, sample_completions

GREEDY = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=2, pad_token_id=0)


def test_samples_equal_unpadded_greedy_generation(tmp_path):
    run = trainer(tmp_path, eval_dataset=prompt_dataset())
    run.model.train()
    samples = sample_completions(run, list(run.eval_dataset), GREEDY)
    assert run.model.training
    assert [sample.prompt for sample in samples] == PROMPTS
    tokenizer = run.processing_class
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        alone = run.model.eval().generate(ids, generation_config=GREEDY)[0, ids.shape[1] :]
        assert sample.completion == tokenizer.decode(alone, skip_special_tokens=True)


def test_tables_grow_at_every_freq(tmp_path, monkeypatch):
    tables = []
    monkeypatch.setattr(
        "trl.trainer.samples.log_table",
        lambda name, table, report_to, **options: tables.append((name, table, options["step"])) or ["wandb"],
    )
    run = trainer(tmp_path, eval_dataset=prompt_dataset())
    run.add_callback(LogCompletionsCallback(run, GREEDY, num_prompts=2, freq=2))
    run.train()
    assert [(name, len(table), step) for name, table, step in tables] == [
        ("completions", 2, 2),
        ("completions", 4, 4),
    ]
    assert list(tables[1][1]["step"]) == [2, 2, 4, 4]
    assert list(tables[1][1]["prompt"]) == PROMPTS[:2] * 2
    assert isinstance(tables[1][1], pd.DataFrame)


def test_printed_where_no_tracker_is_active(tmp_path, capsys):
    run = trainer(tmp_path, eval_dataset=prompt_dataset(), steps=1, eval_strategy="no", eval_steps=1)
    run.add_callback(LogCompletionsCallback(run, GREEDY))
    run.train()
    assert "the mat sat on" in capsys.readouterr().out


def test_sampling_leaves_training_alone(tmp_path):
    def weights(folder, sampling):
        torch.manual_seed(3)
        run = trainer(tmp_path / folder, eval_dataset=prompt_dataset())
        for layer in run.model.model.layers:  # dropout draws from the stream that sampling must not move
            layer.self_attn.attention_dropout = 0.3
        if sampling:
            config = GenerationConfig(max_new_tokens=3, do_sample=True, eos_token_id=2, pad_token_id=0)
            run.add_callback(LogCompletionsCallback(run, config, freq=1))
        run.train()
        return run.model.state_dict()

    torch.testing.assert_close(weights("a", True), weights("b", False), atol=0, rtol=0)


def test_prompts_of_every_kind():
    tokenizer = word_tokenizer(special_tokens=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = ChatMlSpecialTokens().chat_template.replace("\\n", " ")
    assert prompt_ids({"prompt": "the cat"}, tokenizer) == [4, 5]
    chat = prompt_ids({"prompt": [{"role": "user", "content": " cat"}]}, tokenizer)
    assert tokenizer.convert_ids_to_tokens(chat) == [
        "<|im_start|>",
        "user",
        "cat",
        "<|im_end|>",
        "<|im_start|>",
        "assistant",
    ]
    prepared = {"input_ids": [4, 5, 6, 2], "completion_mask": [0, 0, 1, 1]}
    assert prompt_ids(prepared, tokenizer) == [4, 5]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "got none"),
        ({"a": prompt_dataset(), "b": prompt_dataset()}, "got 2 of them"),
        (Dataset.from_dict({"text": ["a"]}), r"\['text'\]"),
    ],
)
def test_datasets_are_checked(tmp_path, dataset, message):
    run = trainer(tmp_path, eval_dataset=dataset)
    with pytest.raises(ValueError, match=message):
        LogCompletionsCallback(run)
