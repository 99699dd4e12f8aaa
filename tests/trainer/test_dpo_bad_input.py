"""What DPOTrainer refuses or counts before the first step: the error's class, and what was given and what to do."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import TrainingArguments

from tests.tiny import tiny_classifier, tiny_model, tiny_seq2seq
from tests.tiny_tokenizers import tiny_tokenizer
from tests.tiny_vision import tiny_image, tiny_processor, tiny_vision_model
from tests.trainer.dpo_runs import make, pairs
from trl import DPOConfig, DPOTrainer

GOOD = {"prompt": "The sky is", "chosen": " blue", "rejected": " brown"}
ASK = {"role": "user", "content": "And then?"}
UP = {"role": "assistant", "content": "Look up."}
NEXT = {"role": "assistant", "content": "Next."}
CHAT = {"prompt": [ASK], "chosen": [UP], "rejected": [NEXT]}


def text_trainer(rows, tmp_path, **given):
    settings = {name: given.pop(name) for name in list(given) if name in DPOConfig.__dataclass_fields__}
    args = DPOConfig(str(tmp_path), use_cpu=True, report_to="none", **settings)
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    template = given.pop("template", "chatml")
    given = {
        "model": tiny_model("llama", vocab_size=400),
        "processing_class": tiny_tokenizer(template),
        **given,
    }
    return DPOTrainer(args=args, train_dataset=data, **given)


@dataclass(frozen=True)
class Bad:
    """Rows or arguments that must be refused with `error`, whose message has all of `says` in order."""

    error: type[Exception]
    says: tuple[str, ...]
    rows: Any = field(default_factory=lambda: [GOOD] * 2)
    given: dict[str, Any] = field(default_factory=dict)


def lazily(make_value: Callable) -> Any:
    return make_value


def without_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


CASES: dict[str, Bad] = {
    # rows
    "positions": Bad(
        ValueError, ("positions",), [{**GOOD, "chosen": " blue" * 300}],
        {"max_length": None, "max_prompt_length": None, "model": lazily(lambda: tiny_model("gpt2", vocab_size=400))},
    ),
    "nothing left": Bad(ValueError, ("max_length",), [{**GOOD, "prompt": "The sky is " * 9}] * 2,
                        {"max_length": 8, "truncation_mode": "keep_start", "max_prompt_length": None}),
    # arguments
    "args": Bad(TypeError, ("args must be a DPOConfig", "dict"), given={"args": {}}),
    "reference with another vocabulary": Bad(
        ValueError, ("ref_model has a vocabulary of 96 tokens, the model one of 400",),
        given={"ref_model": lazily(lambda: tiny_model("llama"))},
    ),
    "reference of another kind": Bad(
        ValueError, ("ref_model has is_encoder_decoder=True",),
        given={"ref_model": lazily(lambda: tiny_seq2seq("t5", vocab_size=400))},
    ),
    "reference that is nowhere": Bad(OSError, ("nowhere",), given={"ref_model": "/nowhere/model"}),
    "arguments for a loaded reference": Bad(
        ValueError, ("ref_model_init_kwargs", "loaded already"),
        given={"ref_model": lazily(lambda: tiny_model("llama", vocab_size=400)), "ref_model_init_kwargs": {"dtype": "auto"}},
    ),
    "arguments for no reference": Bad(
        ValueError, ("ref_model_init_kwargs", "no ref_model"), given={"ref_model_init_kwargs": {"dtype": "auto"}}
    ),
    "reference beside an adapter": Bad(
        ValueError, ("ref_model was given with a PEFT model", "force_use_ref_model=True"),
        given={
            "ref_model": lazily(lambda: tiny_model("llama", vocab_size=400)),
            "peft_config": LoraConfig(r=2, target_modules=["q_proj"]),
        },
    ),
    "adapter name without adapter": Bad(
        ValueError, ("ref_adapter_name='reference' must name a PEFT adapter",),
        given={"ref_adapter_name": "reference"},
    ),
    "two references": Bad(
        ValueError, ("ref_adapter_name='reference' cannot be combined",),
        given={"ref_adapter_name": "reference", "ref_model": lazily(lambda: tiny_model("llama", vocab_size=400))},
    ),
    "a classifier": Bad(
        (TypeError, ValueError), ("LlamaForSequenceClassification",),
        given={"model": lazily(lambda: tiny_classifier("llama", vocab_size=400))},
    ),
    "sharing that the model cannot": Bad(
        ValueError, ("prefix_sharing=True", "cannot take shared prompts", "Use 'auto'"),
        given={"model": lazily(lambda: tiny_model("bloom", vocab_size=400)), "prefix_sharing": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_before_the_first_step(name, tmp_path):
    case = CASES[name]
    given = {key: value() if callable(value) else value for key, value in case.given.items()}
    rows = case.rows() if callable(case.rows) else case.rows
    if "args" in given:
        with pytest.raises(case.error) as caught:
            DPOTrainer(tiny_model("llama"), args=given["args"])
    else:
        with pytest.raises(case.error) as caught:
            text_trainer(rows, tmp_path, **given)
    message, start = str(caught.value), 0
    for part in case.says:
        assert part in message[start:], message
        start = message.index(part, start)


def test_the_policy_itself_is_no_reference():
    model = tiny_model("gpt2", dtype=torch.float64)
    with pytest.raises(ValueError, match="ref_model and model share weights that train"):
        make(model=model, ref_model=model)


def test_equal_completions_are_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        text_trainer([GOOD, {**GOOD, "rejected": " blue"}, GOOD], tmp_path)
    assert any(
        "chosen" in r.getMessage() and "1" in r.getMessage() and "equal" in r.getMessage()
        for r in caplog.records
    )


def test_a_batch_of_something_else():
    trainer = make()
    with pytest.raises(
        ValueError, match=r"a batch has .*'input_ids'.*expected prompt_input_ids, chosen_input_ids"
    ):
        trainer.compute_loss(trainer.model, {"input_ids": torch.ones(2, 3)})


def test_rows_of_later_without_what_was_asked_in_advance(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    trainer = make(precompute_ref_log_probs=True)
    with pytest.raises(ValueError, match=r"ref_chosen_logps.*the reference was asked before the first step"):
        trainer.evaluate(Dataset.from_list(pairs()))


def test_a_stream_cannot_be_asked_in_advance():
    stream = IterableDataset.from_generator(lambda: iter(pairs()))
    with pytest.raises(ValueError, match="goes over all rows before training"):
        make(train_dataset=stream, precompute_ref_log_probs=True)


# ---- images


def image_trainer(rows, tmp_path, **given):
    processor = tiny_processor("llava")
    model = tiny_vision_model(processor)
    return text_trainer(rows, tmp_path, model=model, processing_class=processor, max_length=None, **given)


def images(count, **changes):
    text = [{"type": "image"}, {"type": "text", "text": "And then?"}]
    row = {
        "images": [tiny_image(seed) for seed in range(count)],
        "prompt": [{"role": "user", "content": text}],
    }
    answers = {side: [{"role": "assistant", "content": [{"type": "text", "text": t}]}] for side, t in (("chosen", "Up."), ("rejected", "Next."))}  # fmt: skip
    return {**row, **answers, **changes}


@pytest.mark.parametrize("count", [0, 2])
def test_images_that_are_missing_or_too_many(count, tmp_path):
    with pytest.raises(ValueError, match=rf"train dataset, row 1, column .*{count}"):
        image_trainer([images(1), images(count)], tmp_path)


def test_samples_of_images_need_our_collator(tmp_path):
    with pytest.raises(ValueError, match=r"generate_during_eval=True.*data_collator"):
        image_trainer([images(1)] * 2, tmp_path, generate_during_eval=True, data_collator=len)


def test_the_fallback_to_padded_rows_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = text_trainer([GOOD] * 2, tmp_path, model=tiny_model("bloom", vocab_size=400))
    said = [r for r in caplog.records if "its batches are padded" in r.getMessage()]
    assert not trainer.shares_prefix and len(said) == 1
    assert isinstance(trainer.args, TrainingArguments)
