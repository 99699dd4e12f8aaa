"""SFTTrainer as its users call it: every type of data set, and which tokens of it are trained, read off the batches."""

import json

import pytest
import torch
from datasets import Dataset, IterableDataset

from tests.tiny_tokenizers import CHATML, TEMPLATES, tiny_tokenizer
from tests.trainer.sft_runs import (
    AGAIN,
    BLUE,
    NEXT,
    USER,
    config,
    logged,
    make,
    model_for,
    sequences,
    trained_spans,
)
from trl import SFTTrainer

SKY = "<|im_start|>user\nWhat colour is the sky?<|im_end|>\n<|im_start|>assistant\n"
CHAT = SKY + "It is blue.<|im_end|>\n"
TWO_TURNS = [{"messages": [USER, BLUE, AGAIN, NEXT]}]
ONE_TURN = [{"messages": [USER, BLUE]}]
SPLIT = [{"prompt": [USER], "completion": [BLUE]}]
PLAIN = [{"prompt": "Q: How many apples are left? A:", "completion": " Seven apples."}]
FROM_VALUE = [{"conversations": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": BLUE["content"]}]}]  # fmt: skip
ANSWERS = ["It is blue.<|im_end|>", "Look up.<|im_end|>"]
IDS = tiny_tokenizer()("Look up. Next.")["input_ids"]
TOKENS = {"input_ids": IDS, "completion_mask": [0, 0] + [1] * (len(IDS) - 2)}
LABELS = {"input_ids": IDS, "labels": [-100] * (len(IDS) - 1) + IDS[-1:]}
DECODE = tiny_tokenizer().decode
ASSISTANT = {"assistant_only_loss": True}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}},
}  # fmt: skip


def formatted(row):
    return f"Q: {row['q']}"


def formatted_batch(rows):
    return [f"Q: {q}" for q in rows["q"]]


# name -> (rows, template, settings, arguments of the trainer, trained spans of the row)
TYPES = {
    "text": ([{"text": "Look up."}], "chatml", {}, {}, ["Look up.<|im_end|>"]),
    "text of another name": ([{"body": "Look up."}], "chatml", {"dataset_text_field": "body"}, {}, ["Look up.<|im_end|>"]),
    "text that ends already": ([{"text": "Look up.<|im_end|>"}], "chatml", {}, {}, ["Look up.<|im_end|>"]),
    "messages": (ONE_TURN, "chatml", {}, {}, [CHAT]),
    "from and value": (FROM_VALUE, "chatml", {}, {}, [CHAT]),
    "assistant only, marked": (TWO_TURNS, "marked", ASSISTANT, {}, ANSWERS),
    "assistant only, not marked": (TWO_TURNS, "chatml", ASSISTANT, {}, ANSWERS),
    "assistant only, marks without the stop": (TWO_TURNS, "marked_without_stop", ASSISTANT, {}, ["It is blue.<|im_end|>", "Look up.<|im_end|>"]),
    "assistant only, from and value": (FROM_VALUE, "chatml", ASSISTANT, {}, ANSWERS[:1]),
    "assistant only, as Qwen 3 writes": (TWO_TURNS, "qwen3_like", ASSISTANT, {}, ["<think>\n\n</think>\n\n" + text for text in ANSWERS]),
    "prompt and completion": (PLAIN, "none", {}, {}, [" Seven apples.<|im_end|>"]),
    "prompt and completion, both trained": (
        PLAIN, "none", {"completion_only_loss": False}, {}, [PLAIN[0]["prompt"] + " Seven apples.<|im_end|>"],
    ),
    "prompt and completion, asked for": (PLAIN, "none", {"completion_only_loss": True}, {}, [" Seven apples.<|im_end|>"]),
    "conversational completion": (SPLIT, "chatml", {}, {}, ["It is blue.<|im_end|>\n"]),
    "conversational completion, both trained": (SPLIT, "chatml", {"completion_only_loss": False}, {}, [CHAT]),
    "completion and assistant only": (
        [{"prompt": [USER, BLUE, AGAIN], "completion": [NEXT]}], "chatml", ASSISTANT, {}, ["Look up.<|im_end|>"],
    ),
    "assistant only over prompt and completion": (
        [{"prompt": [USER, BLUE, AGAIN], "completion": [NEXT]}], "chatml", {**ASSISTANT, "completion_only_loss": False}, {}, ANSWERS,
    ),
    "formatting function": ([{"q": "Next."}], "chatml", {}, {"formatting_func": formatted}, ["Q: Next.<|im_end|>"]),
    "formatting function of a batch": ([{"q": "Next."}], "chatml", {}, {"formatting_func": formatted_batch}, ["Q: Next.<|im_end|>"]),
    "tokens": ([{"input_ids": IDS}], "chatml", {}, {}, ["Look up. Next."]),
    "tokens with a mask": ([TOKENS], "chatml", {}, {}, [DECODE(IDS[2:])]),
    "tokens with a mask, all trained": ([TOKENS], "chatml", {"completion_only_loss": False}, {}, ["Look up. Next."]),
    "tokens with labels": ([LABELS], "chatml", {}, {}, [DECODE(IDS[-1:])]),
    "prepared by the user": (
        [{**LABELS, "note": "kept out"}], "chatml", {"dataset_kwargs": {"skip_prepare_dataset": True}}, {}, [DECODE(IDS[-1:])],
    ),
    "cut": ([{"text": "Look up. Next."}], "chatml", {"max_length": 3}, {}, [DECODE(IDS[:3])]),
    "not cut": ([{"text": "Look up. " * 300}], "chatml", {"max_length": None}, {}, ["Look up. " * 300 + "<|im_end|>"]),
}  # fmt: skip


@pytest.mark.parametrize("layout", [{}, {"padding_free": True}], ids=["padded", "padding-free"])
@pytest.mark.parametrize("name", TYPES)
def test_trained_tokens(name, layout):
    rows, template, settings, arguments, expected = TYPES[name]
    tokenizer = tiny_tokenizer(template)
    trainer = make(rows, tokenizer=tokenizer, trainer=arguments, **settings, **layout)
    assert trained_spans(trainer) == [expected]
    streamed = make(Dataset.from_list(rows).to_iterable_dataset(), tokenizer=tokenizer, trainer=arguments, **settings, **layout)  # fmt: skip
    assert trained_spans(streamed) == [expected] * 4  # a stream begins again until the batch is full


def test_tools_are_part_of_what_the_model_reads():
    rows = [
        {"messages": [USER, BLUE], "tools": json.dumps([TOOL])},
        {"messages": [USER, BLUE], "tools": None},
    ]
    trainer = make(rows, tokenizer=tiny_tokenizer("qwen3_like"), assistant_only_loss=True)
    texts = sorted(trainer.processing_class.decode(row["input_ids"]) for row in trainer.train_dataset)
    assert ['"name": "look"' in text for text in texts] == [True, False]
    assert trained_spans(trainer) == [["<think>\n\n</think>\n\nIt is blue.<|im_end|>"]] * 2


def test_a_pad_token_that_is_also_the_stop_token_is_still_trained():
    tokenizer = tiny_tokenizer(pad_token="<|im_end|>")
    rows = [{"messages": [USER, BLUE]}, {"messages": [USER, BLUE, AGAIN, NEXT]}]
    trainer = make(rows, tokenizer=tokenizer, assistant_only_loss=True)
    batch = next(iter(trainer.get_train_dataloader()))
    assert trained_spans(trainer, batch) == [ANSWERS[:1], ANSWERS]
    stop = tokenizer.eos_token_id
    assert (batch["labels"] == stop).sum() == 3
    assert (batch["input_ids"] == stop).sum() > 6  # five turns' ends and the padding
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


# ---- batches


TEXTS = [{"text": text} for text in ("Look up.", "Next.", "The answer is 42.", "It is blue. It is blue. It is blue.")]


def all_sequences(trainer):
    return sorted(tuple(ids) for batch in trainer.get_train_dataloader() for ids, _ in sequences(batch))


def test_packing_keeps_every_sequence_and_keeps_them_apart():
    plain = make(TEXTS)
    packed = make(TEXTS, packing=True, max_length=24)
    assert len(packed.train_dataset) < len(plain.train_dataset)
    assert all_sequences(packed) == all_sequences(plain)
    batch = next(iter(packed.get_train_dataloader()))
    assert "attention_mask" not in batch
    assert batch["position_ids"].max() < 24


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_a_stream_of_text_is_packed(strategy):
    stream = IterableDataset.from_generator(lambda: iter(TEXTS * 8))
    trainer = make(stream, packing=True, packing_strategy=strategy, max_length=16, max_steps=3)
    trainer.train()
    stored = make(TEXTS * 8, packing=True, packing_strategy=strategy, max_length=16)
    tokens = sorted(token for row in trainer.train_dataset for token in row["input_ids"])
    assert tokens == sorted(token for row in stored.train_dataset for token in row["input_ids"])
    assert len(logged(trainer, "loss")) == 3
    if strategy == "wrapped":
        assert logged(trainer, "num_tokens") == [64, 128, 192]


@pytest.mark.parametrize(
    ("settings", "is_packed"),
    [({}, True), ({"eval_packing": True}, True), ({"eval_packing": False}, False), ({"packing": False, "eval_packing": True}, True)],
)  # fmt: skip
def test_evaluation_packing(settings, is_packed):
    data = Dataset.from_list(TEXTS)
    trainer = make(TEXTS, trainer={"eval_dataset": data}, **{"packing": True, "max_length": 24, **settings})
    assert ("seq_lengths" in trainer.eval_dataset.column_names) == is_packed
    losses = trainer.evaluate()
    plain = make(TEXTS, trainer={"eval_dataset": data}).evaluate()
    assert losses["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


def test_shuffling_changes_the_order_only():
    plain, shuffled = make(TEXTS * 4), make(TEXTS * 4, shuffle_dataset=True)
    rows = [[tuple(row["input_ids"]) for row in trainer.train_dataset] for trainer in (plain, shuffled)]
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1])


# ---- models and tokenizers


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    model_for().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_path_loads_model_and_tokenizer(saved):
    data = Dataset.from_list(ONE_TURN * 4)
    by_path = SFTTrainer(str(saved), config(), train_dataset=data)
    assert by_path.processing_class.chat_template == CHATML
    given = make(ONE_TURN * 4)
    for trainer in (by_path, given):
        trainer.train()
    assert logged(by_path, "loss") == logged(given, "loss")
    assert SFTTrainer(saved, config(), train_dataset=data).model.config.vocab_size == 400


def test_a_template_from_a_file(tmp_path):
    path = tmp_path / "short.jinja"
    path.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}")
    trainer = make(ONE_TURN, tokenizer=tiny_tokenizer("none"), chat_template_path=str(path))
    assert trained_spans(trainer) == [["user: What colour is the sky?<|im_end|>assistant: It is blue.<|im_end|>"]]
    assert trainer.processing_class.chat_template == path.read_text()


@pytest.fixture(scope="module")
def larger_tokenizer(tmp_path_factory):
    """A tokenizer with ChatML and two tokens more, the stop token one of them."""
    tokenizer = tiny_tokenizer("other_stop")
    tokenizer.chat_template = TEMPLATES["chatml"].replace("<|im_end|>", "<|over|>")
    tokenizer.add_special_tokens({"eos_token": "<|over|>"})
    tokenizer.add_tokens(["<|extra|>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_template_from_a_tokenizer_brings_its_tokens(larger_tokenizer, architecture):
    model = model_for(architecture=architecture)
    before = model.get_input_embeddings().weight.detach().clone()
    trainer = make(ONE_TURN * 4, model=model, tokenizer=tiny_tokenizer("none"), chat_template_path=str(larger_tokenizer), max_steps=1)  # fmt: skip
    assert trained_spans(trainer)[0] == [CHAT.replace("<|im_end|>", "<|over|>")]
    weights = model.get_input_embeddings().weight
    assert weights.shape[0] == 448  # 402 tokens in rows of 64
    torch.testing.assert_close(weights[400], before.mean(0), rtol=0, atol=1e-6)
    assert trainer.processing_class.eos_token == "<|over|>"
    trainer.train()
    assert model.generation_config.eos_token_id == 400
