"""Programs of 0.4-0.11: every older argument lands on the config, and one warning says where it went."""

import warnings

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainingArguments

from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.sft_runs import QUICK, config, logged, model_for, sequences, trained_spans
from trl import (
    BCOConfig,
    CPOConfig,
    DataCollatorForCompletionOnlyLM,
    DPOConfig,
    GKDConfig,
    KTOConfig,
    ORPOConfig,
    PRMConfig,
    RewardConfig,
    SFTConfig,
    SFTTrainer,
)
from trl.legacy import move_onto_config
from trl.trainer import ConstantLengthDataset, IterativeSFTConfig

TEXTS = Dataset.from_list([{"body": text} for text in ("Look up.", "Next.", "The answer is 42.")] * 4)
ANSWERS = Dataset.from_list(
    [{"text": "Q: How many apples are left? A: Seven apples."}, {"text": "Q: And then? A: Next."}]
)
PLAIN = {name: value for name, value in QUICK.items() if name not in ("disable_tqdm", "seed")}


def older_args(folder, **settings):
    return TrainingArguments(str(folder), disable_tqdm=True, seed=11, **{**PLAIN, **settings})


def warned(call):
    """The result, and the text of the one FutureWarning of trl's, which must point here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    # transformers' own are of its older names (5.23, in `older_args`), and of PEFT's calls.
    ours = [entry for entry in caught if entry.category is FutureWarning and "removed in v6" not in str(entry.message)]
    assert len(ours) == 1
    assert ours[0].filename == __file__
    return result, str(ours[0].message)


def test_the_call_of_0_4(tmp_path):
    trainer, text = warned(
        lambda: SFTTrainer(
            model_for(),
            args=older_args(tmp_path, learning_rate=3e-3, weight_decay=0.1),
            train_dataset=TEXTS,
            eval_dataset=TEXTS,
            tokenizer=tiny_tokenizer(),
            dataset_text_field="body",
            max_seq_length=16,
            packing=True,
            eval_packing=False,
            dataset_num_proc=1,
            dataset_kwargs={"add_special_tokens": False},
            dataset_batch_size=10,
            num_of_sequences=8,
            chars_per_token=3.0,
            infinite=False,
            neftune_noise_alpha=5.0,
            peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        )
    )
    found = {
        name: getattr(trainer.args, name)
        for name in ("learning_rate", "weight_decay", "max_steps", "dataset_text_field", "max_length", "packing", "eval_packing",
                     "dataset_num_proc", "dataset_kwargs", "neftune_noise_alpha", "gradient_checkpointing", "bf16")
    }  # fmt: skip
    assert found == {
        "learning_rate": 3e-3, "weight_decay": 0.1, "max_steps": 2, "dataset_text_field": "body", "max_length": 16,
        "packing": True, "eval_packing": False, "dataset_num_proc": 1, "dataset_kwargs": {"add_special_tokens": False},
        "neftune_noise_alpha": 5.0, "gradient_checkpointing": False, "bf16": False,
    }  # fmt: skip
    assert isinstance(trainer.args, SFTConfig)
    assert "seq_lengths" in trainer.train_dataset.column_names
    assert "seq_lengths" not in trainer.eval_dataset.column_names
    for words in ("tokenizer -> the argument processing_class", "max_seq_length -> SFTConfig(max_length=...)",
                  "packing -> SFTConfig(packing=...)", "num_of_sequences -> nothing"):  # fmt: skip
        assert words in text
    trainer.train()
    assert len(logged(trainer, "loss")) == 2


OLDER_CONFIGS = [
    CPOConfig,
    BCOConfig,
    DPOConfig,
    GKDConfig,
    IterativeSFTConfig,
    KTOConfig,
    ORPOConfig,
    PRMConfig,
    RewardConfig,
    SFTConfig,
]


@pytest.mark.parametrize("kind", OLDER_CONFIGS)
def test_plain_arguments_without_a_tracker_name_none(kind, tmp_path):
    """Every trainer that takes plain `TrainingArguments` does so here; transformers makes `[None]` of None."""
    args = TrainingArguments(str(tmp_path), report_to=None, use_cpu=True)
    moved = move_onto_config(kind, model=None, args=args, processing_class=None, older={}).args
    assert args.report_to == [None] and moved.report_to == []


def test_a_run_with_plain_arguments_and_no_tracker(tmp_path):
    trainer = SFTTrainer(
        model_for(),
        older_args(tmp_path, report_to=None),
        train_dataset=ANSWERS,
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    assert len(logged(trainer, "loss")) == 2


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"dataset_text_field": "body"}, {"dataset_text_field": "body"}),
        ({"dataset_text_field": "body", "max_seq_length": 5}, {"dataset_text_field": "body", "max_length": 5}),
        ({"dataset_text_field": "body", "packing": True, "max_seq_length": 16}, {"dataset_text_field": "body", "packing": True, "max_length": 16}),
    ],
)  # fmt: skip
def test_older_and_newer_programs_train_alike(tmp_path, older, newer):
    first, _ = warned(lambda: SFTTrainer(model_for(), older_args(tmp_path), train_dataset=TEXTS, tokenizer=tiny_tokenizer(), **older))  # fmt: skip
    second = SFTTrainer(model_for(), config(**newer), train_dataset=TEXTS, processing_class=tiny_tokenizer())
    for trainer in (first, second):
        trainer.train()
    assert logged(first, "loss") == logged(second, "loss")


def test_older_arguments_beside_a_new_config(tmp_path):
    args = config(tmp_path, learning_rate=1e-3, pad_to_multiple_of=8)
    trainer, _ = warned(lambda: SFTTrainer(model_for(), args, train_dataset=TEXTS, tokenizer=tiny_tokenizer(), dataset_text_field="body"))  # fmt: skip
    assert (trainer.args.learning_rate, trainer.args.pad_to_multiple_of) == (1e-3, 8)
    assert (args.dataset_text_field, trainer.args.dataset_text_field) == ("text", "body")


@pytest.mark.parametrize("packing", [False, True])
def test_constant_length_dataset(tmp_path, packing):
    tokenizer = tiny_tokenizer()
    rows = ConstantLengthDataset(
        tokenizer, TEXTS, dataset_text_field="body", seq_length=8, num_of_sequences=4, shuffle=False
    )
    trainer = SFTTrainer(
        model_for(), config(tmp_path, packing=packing, max_steps=3), train_dataset=rows, eval_dataset=rows, processing_class=tokenizer
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    expected = [row["input_ids"].tolist() for row in rows][:4]
    assert [ids for ids, _ in sequences(batch)] == expected
    assert (batch["labels"] != -100).sum() == (28 if packing else 32)
    trainer.train()
    assert logged(trainer, "num_tokens") == [32, 64, 96]
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("padding_free", [False, True])
def test_completion_only_collator(tmp_path, padding_free):
    tokenizer = tiny_tokenizer()
    collator = DataCollatorForCompletionOnlyLM(" A:", tokenizer=tokenizer, padding_free=padding_free)
    trainer = SFTTrainer(
        model_for(),
        config(tmp_path),
        train_dataset=ANSWERS,
        processing_class=tokenizer,
        data_collator=collator,
    )
    assert trained_spans(trainer) == [[" Next.<|im_end|>"], [" Seven apples.<|im_end|>"]]
    completions = Dataset.from_list(
        [
            {"prompt": "Q: How many apples are left? A:", "completion": " Seven apples."},
            {"prompt": "Q: And then? A:", "completion": " Next."},
        ]
    )
    newer = SFTTrainer(model_for(), config(), train_dataset=completions, processing_class=tokenizer)
    for run in (trainer, newer):
        run.train()
    assert logged(trainer, "loss") == pytest.approx(logged(newer, "loss"), rel=1e-6)


@pytest.mark.parametrize("padding_free", [False, True])
def test_completion_only_collator_over_packed_rows_is_refused(tmp_path, padding_free):
    collator = DataCollatorForCompletionOnlyLM(" A:", tokenizer=tiny_tokenizer(), padding_free=padding_free)
    with pytest.raises(ValueError, match=r"DataCollatorForCompletionOnlyLM.*they would see each other.*packing=False"):
        SFTTrainer(
            model_for(), config(tmp_path, packing=True, max_length=64), train_dataset=ANSWERS, processing_class=tiny_tokenizer(),
            data_collator=collator,
        )  # fmt: skip


def test_unknown_arguments(tmp_path):
    with pytest.raises(TypeError, match=r"'max_seq_len'\. Did you mean max_(seq_)?length"):
        SFTTrainer(model_for(), config(tmp_path), train_dataset=TEXTS, max_seq_len=3)
    with pytest.raises(TypeError, match=r"'train_data'\. Did you mean train_dataset\?"):
        SFTTrainer(model_for(), config(tmp_path), train_data=TEXTS)
    with pytest.raises(TypeError, match="field of SFTConfig"):
        SFTTrainer(model_for(), config(tmp_path), train_dataset=TEXTS, learning_rate=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tokenizer": tiny_tokenizer(), "processing_class": tiny_tokenizer()},
            "tokenizer and processing_class",
        ),
        ({"model_init": model_for}, "model_init and model"),
    ],
)
def test_an_older_and_its_newer_argument(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        SFTTrainer(model_for(), config(tmp_path), train_dataset=TEXTS, **given)
