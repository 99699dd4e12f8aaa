"""What SFTTrainer refuses: the exact error class, and what was given, what is allowed and what to do; before a step."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, T5Config

from tests.tiny import tiny_config
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.sft_runs import config, model_for
from trl import SFTTrainer

TEXTS = [{"text": "Look up."}, {"text": "Next."}] * 2
LONG = [{"text": "Look up."}, {"text": "Next. " * 60}]  # some 180 tokens


def data(rows=TEXTS):
    return Dataset.from_list(rows)


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


def no_labels(rows):
    return {"input_ids": torch.tensor([row["input_ids"][:2] for row in rows])}


CHAT = [{"role": "user", "content": "Up?"}, {"role": "assistant", "content": "Blue."}]


def padded(rows, length=4):
    ids = torch.tensor([row["input_ids"][:length] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class TorchRows(torch.utils.data.Dataset):
    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, index):
        return TEXTS[index]


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return AutoModelForSeq2SeqLM.from_config(T5Config(vocab_size=400, decoder_start_token_id=0, **sizes))


@dataclass(frozen=True)
class Bad:
    """What is given beside a good model, tokenizer and data set; the error, whose message has all of `says` in order."""

    error: type[Exception]
    says: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], dict[str, Any]] = dict  # arguments that are expensive to build


def given(**arguments: Any) -> dict[str, Any]:
    return arguments


CASES: dict[str, Bad] = {
    # the model
    "no model": Bad(ValueError, ("model must be a name, a path or a model", "got None", "first argument"), {}, {"model": None}),
    "a number as model": Bad(TypeError, ("model must be a PreTrainedModel", "got int"), {}, {"model": 3}),
    "a torch module as model": Bad(TypeError, ("PreTrainedModel", "got Linear"), {}, {"model": torch.nn.Linear(2, 2)}),
    "a number as model, no tokenizer": Bad(TypeError, ("PreTrainedModel", "got int"), {}, {"model": 3, "processing_class": None}),
    "a model without a head": Bad(
        TypeError, ("LlamaModel", "AutoModelForCausalLM"),
        make=lambda: given(model=AutoModel.from_config(tiny_config("llama", vocab_size=400))),
    ),
    "a model's path that is not there": Bad(FileNotFoundError, ("There is no folder './nowhere'",), {}, {"model": "./nowhere"}),
    "a classifier": Bad(
        TypeError, ("LlamaForSequenceClassification", "AutoModelForCausalLM"),
        make=lambda: given(model=AutoModelForSequenceClassification.from_config(tiny_config("llama", vocab_size=400))),
    ),
    "an encoder-decoder": Bad(
        TypeError, ("T5ForConditionalGeneration, an encoder-decoder", "AutoModelForCausalLM"), make=lambda: given(model=t5()),
    ),
    "a model without weights": Bad(
        ValueError, ("lacks 21 weights", "embed_tokens", "init_empty_weights"), make=lambda: given(model=model_for().to("meta")),
    ),
    "an unknown dtype": Bad(ValueError, ("float31",), {"model_init_kwargs": {"dtype": "float31"}}, {"model": "./nowhere"}),
    "init kwargs of a loaded model": Bad(
        ValueError, ("model_init_kwargs", "name or path"), {"model_init_kwargs": {"dtype": "float32"}},
    ),
    "no tokenizer to be found": Bad(ValueError, ("no name to find its tokenizer", "Pass `processing_class`"), {}, {"processing_class": None}),
    "a string as tokenizer": Bad(
        TypeError, ("processing_class must be a tokenizer", "got str"), {}, {"processing_class": "gpt2"},
    ),
    "a model with fewer embeddings than tokens": Bad(
        ValueError, ("row 0, column 'input_ids': token id", "expected 0 to 199", "embeds 200 token ids, the tokenizer has 400", "resize_token_embeddings"),
        make=lambda: given(model=model_for(vocab_size=200)),
    ),
    "the same of a stream": Bad(
        ValueError, ("row 0, column 'input_ids': token id", "embeds 200 token ids, the tokenizer has 400", "resize_token_embeddings"),
        make=lambda: given(model=model_for(vocab_size=200), train_dataset=stream(TEXTS)),
    ),
    "more tokens than a table of positions": Bad(
        ValueError, ("train dataset: 1 of 2 sequences", "64 positions of the model", "the longest has", "Set max_length=64"),
        make=lambda: given(model=model_for(architecture="gpt2", max_position_embeddings=64), train_dataset=data(LONG)),
    ),
    "the same of packed rows": Bad(
        ValueError, ("train dataset: 1 of 2 sequences", "Set max_length=64"), {"packing": True, "max_length": 256},
        make=lambda: given(model=model_for(architecture="gpt2", max_position_embeddings=64), train_dataset=data(LONG)),
    ),
    "a stream that may have more": Bad(
        ValueError, ("train dataset is a stream", "positions for 64 tokens", "Set max_length to at most 64"),
        make=lambda: given(model=model_for(architecture="gpt2", max_position_embeddings=64), train_dataset=stream(TEXTS)),
    ),
    "the same of an evaluation set": Bad(
        ValueError, ("eval dataset: 1 of 2 sequences", "Set max_length=64"),
        make=lambda: given(model=model_for(architecture="opt", max_position_embeddings=64), eval_dataset=data(LONG)),
    ),
    # the data sets
    "a path": Bad(TypeError, ("train_dataset must be", "got str", "load_dataset('train.jsonl'"), {}, {"train_dataset": "train.jsonl"}),
    "all splits": Bad(
        TypeError, ("got DatasetDict", "one of its splits: train_dataset=dataset[name]", "['test', 'train']"), {},
        {"train_dataset": DatasetDict({"train": data(), "test": data()})},
    ),
    "a torch data set of text": Bad(
        ValueError, ("train dataset, row 0, has ['text']", "must give tokens", "Make a datasets.Dataset"), {}, {"train_dataset": TorchRows()},
    ),
    "a list to evaluate": Bad(TypeError, ("eval_dataset must be", "got list"), {}, {"eval_dataset": TEXTS}),
    "a list among several to evaluate": Bad(TypeError, ("eval_dataset['b'] must be", "got list"), {}, {"eval_dataset": {"a": data(), "b": TEXTS}}),
    "no rows in a stream": Bad(ValueError, ("train dataset: no rows", "Check its file"), {}, make=lambda: given(train_dataset=stream([]))),
    "no rows to evaluate": Bad(ValueError, ("small dataset: no rows",), {}, {"eval_dataset": {"small": Dataset.from_dict({"text": []})}}),
    "no data set": Bad(ValueError, ("train_dataset",), {}, {"train_dataset": None}),
    "evaluation without a set": Bad(ValueError, ("eval_strategy", "eval_dataset"), {"eval_strategy": "steps"}),
    "a stream without max_steps": Bad(ValueError, ("max_steps",), {"max_steps": -1}, make=lambda: given(train_dataset=stream(TEXTS))),
    # tokenizer and template
    "eos token of another vocabulary": Bad(ValueError, ("eos_token '</s>' is not in the vocabulary",), {"eos_token": "</s>"}),
    "pad token of another vocabulary": Bad(ValueError, ("pad_token '[PAD]' is not in the vocabulary",), {"pad_token": "[PAD]"}),
    "no such template file": Bad(FileNotFoundError, ("missing.jinja", "is no file"), {"chat_template_path": "missing.jinja"}),
    "no such template folder": Bad(
        FileNotFoundError, ("chat_template_path='./missing'",), {"chat_template_path": "./missing"},
    ),
    # settings
    "unknown dataset_kwargs": Bad(ValueError, ("dataset_kwargs has unknown keys ['shuffle']", "Known are"), {"dataset_kwargs": {"shuffle": True}}),
    "dft and label smoothing": Bad(
        ValueError, ("label_smoothing_factor=0.1 and loss_type='dft'", "expected one", "Leave out"), {"loss_type": "dft", "label_smoothing_factor": 0.1},
    ),
    "one's own loss and dft": Bad(
        ValueError, ("compute_loss_func and loss_type='dft'", "Leave out"), {"loss_type": "dft"}, {"compute_loss_func": lambda *_, **__: 0},
    ),
    **{
        f"a collator that trains what {mask} leaves out": Bad(
            ValueError, ("data_collator partial trains tokens", mask, "Leave data_collator out"), settings,
            {"data_collator": partial(padded, length=None), "train_dataset": data(rows)},
        )
        for mask, settings, rows in (
            ("completion_mask", {}, [{"prompt": "Up is", "completion": " blue"}]),
            ("assistant_masks", {"assistant_only_loss": True}, [{"messages": CHAT}]),
        )
    },
    "a collator that mixes packed rows": Bad(
        ValueError, ("packing=True", "data_collator function", "they would see each other", "packing=False"), {"packing": True, "max_length": 24},
        {"data_collator": padded},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_by_the_constructor(name, monkeypatch, tmp_path):
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    arguments = {"processing_class": tiny_tokenizer(), "train_dataset": data(), **case.trainer, **case.make()}
    model = arguments.pop("model") if "model" in arguments else model_for()
    with pytest.raises(Exception) as caught:
        SFTTrainer(model, config(tmp_path, **case.settings), **arguments).train()
    assert type(caught.value) is case.error, repr(caught.value)
    pattern = ".*".join(re.escape(part) for part in case.says)
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("style", ["torch", "numpy", None])
@pytest.mark.parametrize("masks", [True, False])
def test_collators_that_may_train_what_they_do(style, masks, tmp_path):
    """They leave out what the masks do, or are to train all; they may be given batches only, and change their rows."""

    def collate(rows):
        assert len(rows) == 2 and all("note" not in row for row in rows)
        batch = {name: torch.tensor([list(row.pop(name)) for row in rows]) for name in ("input_ids", "completion_mask")}
        labels = batch["input_ids"].where(batch["completion_mask"].bool() | torch.tensor(not masks), -100)
        return {"input_ids": batch["input_ids"], "labels": labels, "attention_mask": torch.ones_like(labels)}

    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "note": "a"}] * 2).with_format(
        style
    )
    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}, "completion_only_loss": masks}
    args = config(tmp_path, per_device_train_batch_size=2, max_steps=1, **settings)
    SFTTrainer(model_for(), args, train_dataset=rows, processing_class=tiny_tokenizer(), data_collator=collate).train()


def test_a_batch_without_labels(tmp_path):
    trainer = SFTTrainer(
        model_for(),
        config(tmp_path),
        train_dataset=data(),
        processing_class=tiny_tokenizer(),
        data_collator=no_labels,
    )
    with pytest.raises(ValueError, match=r"a batch has \['input_ids'\], expected 'labels' too.*data_collator"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_rows_beyond_computed_positions_are_counted(tmp_path, caplog):
    model = model_for(max_position_embeddings=64)
    SFTTrainer(model, config(tmp_path), train_dataset=data(LONG), processing_class=tiny_tokenizer())
    assert "1 of 2 sequences are longer than the 64 positions" in caplog.text
    assert "Set max_length=64" in caplog.text
    caplog.clear()
    SFTTrainer(model, config(tmp_path, max_length=64), train_dataset=data(LONG), processing_class=tiny_tokenizer())
    assert "positions" not in caplog.text
