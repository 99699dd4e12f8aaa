"""Bad input of every trainer of preferences: one message before the first step, or a counted warning."""

import logging
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image

from tests.contracts.test_bad_input import TRAINERS as TABLE
from tests.contracts.test_bad_input import model_of
from tests.tiny import tiny_model, tiny_seq2seq
from tests.tiny_tokenizers import tiny_tokenizer

TRAINERS = {name: TABLE[name] for name in ("dpo", "cpo", "orpo", "reward", "kto", "bco", "prm")}
OF_PAIRS = ("dpo", "cpo", "orpo", "reward", "kto", "bco")  # the last two take them apart
OF_TEXT = ("cpo", "orpo", "reward", "kto", "bco", "prm")  # they take no images
UNPAIRED = ("kto", "bco")

PAIR = {"prompt": "The sky is", "chosen": " blue", "rejected": " brown"}
RATED = {"prompt": "The sky is", "completion": " blue", "label": True}
STEPS = {"prompt": "How many?", "completions": ["Seven apples.", "Next."], "labels": [True, False]}
ASK = {"role": "user", "content": "And then?"}
UP = {"role": "assistant", "content": "Look up."}
NEXT = {"role": "assistant", "content": "Next."}
WHOLE = {"chosen": [ASK, UP], "rejected": [ASK, NEXT]}
CHAT = {"prompt": [ASK], "chosen": [UP], "rejected": [NEXT]}
IMAGE = Image.new("RGB", (8, 8), "red")


def adapted() -> Any:
    return get_peft_model(model_of("dpo"), LoraConfig(r=2, target_modules=["q_proj"]))


def build(method: str, rows: list[dict[str, Any]], *, of_trainer: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A trainer on rows; `of_trainer` are further arguments of it, functions of no argument called first."""
    trainer, config, _ = TRAINERS[method]
    given = {name: value() if callable(value) else value for name, value in (of_trainer or {}).items()}
    given = {"model": model_of(method), "processing_class": tiny_tokenizer("chatml"), **given}
    args = config(tempfile.mkdtemp(), use_cpu=True, report_to="none", **settings)
    return trainer(args=args, train_dataset=Dataset.from_list(rows), **given)


@dataclass(frozen=True)
class Bad:
    """What `methods` must refuse with `error`, in a message that `says` all of these words in this order."""

    methods: tuple[str, ...]
    error: type[Exception]
    says: tuple[str, ...]
    rows: list[dict[str, Any]] = field(default_factory=lambda: [PAIR] * 2)
    of_trainer: dict[str, Any | Callable[[], Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


BAD: dict[str, Bad] = {
    "empty message": Bad(
        OF_PAIRS, ValueError, ("row 1, column 'rejected': the last message is an empty answer (content '')", "Filter the row out"),
        [CHAT, {**CHAT, "rejected": [{**NEXT, "content": ""}]}],
    ),
    "empty message of a whole conversation": Bad(
        OF_PAIRS, ValueError, ("row 1, column 'chosen': the last message is an empty answer (content '')", "Filter the row out"),
        [WHOLE, {**WHOLE, "chosen": [ASK, {**UP, "content": ""}]}],
    ),
    "empty message alone": Bad(
        UNPAIRED, ValueError, ("row 0, column 'completion': the last message is an empty answer", "Filter the row out"),
        [{"prompt": [ASK], "completion": [{**UP, "content": ""}], "label": True}] * 2,
    ),
    "images": Bad(
        tuple(m for m in OF_TEXT if m != "prm"), ValueError,
        ("train dataset has images", "made for text", "SFTTrainer, DPOTrainer"),
        [{**PAIR, "images": [IMAGE]}] * 2,
    ),
    "images of steps": Bad(
        ("prm",), ValueError, ("train dataset has images", "made for text", "SFTTrainer, DPOTrainer"), [{**STEPS, "image": IMAGE}] * 2
    ),
    "images without a processor": Bad(
        ("dpo",), TypeError, ("processing_class is a", "the data set has a column of images, expected a processor", "AutoProcessor"),
        [{**PAIR, "images": [IMAGE]}] * 2,
    ),
    "reference adapter that does not exist": Bad(
        UNPAIRED, ValueError, ("ref_adapter_name='judge' must be an adapter", "Load it"),
        of_trainer={"model": adapted, "ref_adapter_name": "judge"},
    ),
    "DPO's reference adapter that does not exist": Bad(
        ("dpo",), ValueError, ("ref_adapter_name='judge' must be an adapter", "Load it"),
        of_trainer={"model": adapted}, settings={"ref_adapter_name": "judge"},
    ),
    "tokens of older programs": Bad(
        ("dpo", "cpo", "orpo"), ValueError, ("train dataset has 'chosen_labels'", "each answer behind its prompt", "cut the prompts off"),
        [{"prompt_input_ids": [5], "chosen_input_ids": [5, 6], "rejected_input_ids": [5, 7], "chosen_labels": [-100, 6]}],
    ),
    "one of the reference's two columns": Bad(
        ("dpo",), ValueError, ("train dataset has the reference's columns ['ref_chosen_logps'] and lacks ['ref_rejected_logps']",),
        [{**PAIR, "ref_chosen_logps": -1.0}] * 2,
    ),
    "one of the reference's two numbers": Bad(
        ("kto",), ValueError, ("train dataset has the reference's columns ['reference_logps'] and lacks ['reference_KL_logps']",),
        [{**RATED, "reference_logps": -1.0}] * 2,
    ),
    "numbers of a reference that moves": Bad(
        ("dpo",), ValueError, ("columns ['ref_chosen_logps', 'ref_rejected_logps'], but the reference changes", "Remove the"),
        [{**PAIR, "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0}] * 2, settings={"sync_ref_model": True},
    ),
    "reference that could not follow an adapter": Bad(
        ("dpo",), ValueError, ("SyncRefModelCallback", "needs the model's parameters"),
        of_trainer={"model": adapted, "ref_model": lambda: model_of("dpo")},
        settings={"sync_ref_model": True, "force_use_ref_model": True},
    ),
    "reference of another width that is to follow": Bad(
        ("dpo",), ValueError, ("SyncRefModelCallback", "unlike ['model.layers.0.mlp"),
        of_trainer={"ref_model": lambda: tiny_model("llama", vocab_size=400, intermediate_size=64)},
        settings={"sync_ref_model": True},
    ),
    "nothing to learn from": Bad(
        ("dpo", "kto", "bco"), ValueError, ("beta must be > 0 for loss_type", "got 0"), settings={"beta": 0.0}
    ),
    "unknown loss": Bad(
        ("dpo", "cpo", "kto"), ValueError, ("loss_type", "sigmoid_pair"), settings={"loss_type": "sigmoid_pair"}
    ),
    "more tokens than positions": Bad(
        ("dpo",), ValueError, ("positions",), [{**PAIR, "chosen": " blue" * 300}],
        {"model": lambda: tiny_model("gpt2", vocab_size=400)}, {"max_length": None, "max_prompt_length": None},
    ),
    "nothing left": Bad(
        ("dpo",), ValueError, ("max_length",), [{**PAIR, "prompt": "The sky is " * 9}] * 2,
        settings={"max_length": 8, "truncation_mode": "keep_start", "max_prompt_length": None},
    ),
    "reference of another kind": Bad(
        ("dpo",), ValueError, ("ref_model has is_encoder_decoder=True",),
        of_trainer={"ref_model": lambda: tiny_seq2seq("t5", vocab_size=400)},
    ),
    "a classifier": Bad(("dpo",), TypeError, ("LlamaForSequenceClassification",), of_trainer={"model": lambda: model_of("reward")}),
    "mismatching of one row": Bad(
        ("kto",), ValueError, ("per_device_train_batch_size", "at least 2", "got 1"),
        settings={"per_device_train_batch_size": 1},
    ),
}  # fmt: skip
CASES = [pytest.param(method, bad, id=f"{method}: {name}") for name, bad in BAD.items() for method in bad.methods]


@pytest.mark.parametrize(("method", "bad"), CASES)
def test_it_is_refused_before_the_first_step(method, bad):
    with pytest.raises(bad.error) as caught:
        build(method, bad.rows, of_trainer=bad.of_trainer, **bad.settings)
    assert re.search(".*".join(map(re.escape, bad.says)), str(caught.value), re.DOTALL), str(caught.value)


@dataclass(frozen=True)
class Told:
    """What `methods` train on, with a warning that `says` these words."""

    methods: tuple[str, ...]
    says: str
    rows: list[dict[str, Any]]


TOLD: dict[str, Told] = {
    "equal completions": Told(
        ("dpo", "cpo", "orpo", "reward"), r"in 2 of \d+ rows \(first: \[1, 3\]\) the chosen and the rejected completion are equal",
        [PAIR, {**PAIR, "rejected": " blue"}, PAIR, {**PAIR, "rejected": " blue"}],
    ),
    "equal completions of pairs taken apart": Told(
        UNPAIRED, r"in 2 of \d+ rows \(first: \[1, 3\]\) the chosen and the rejected completion are equal",
        [CHAT, {**CHAT, "rejected": [UP]}, CHAT, {**CHAT, "rejected": [UP]}],
    ),
    "desirable rows alone": Told(UNPAIRED, r"all 4 rows are desirable \(label true\)", [RATED] * 4),
    "undesirable rows alone": Told(
        UNPAIRED, r"all 4 rows are undesirable \(label false\)",
        [{**RATED, "label": False}] * 4,
    ),
}  # fmt: skip
TOLD_CASES = [
    pytest.param(method, told, id=f"{method}: {name}") for name, told in TOLD.items() for method in told.methods
]


@pytest.mark.parametrize(("method", "told"), TOLD_CASES)
def test_it_is_trained_on_with_a_warning(method, told, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = build(method, told.rows)
    assert len(trainer.train_dataset) in (4, 8)
    messages = [record.getMessage() for record in caplog.records]
    assert sum(bool(re.search(told.says, message)) for message in messages) == 1, messages


@pytest.mark.parametrize("method", TRAINERS)
def test_smoothing_of_another_loss_is_said_to_do_nothing(method, caplog):
    with caplog.at_level(logging.WARNING, "trl.trainer.inherited"):
        build(method, [STEPS if method == "prm" else PAIR] * 2, label_smoothing_factor=0.1)
    said = [message for message in caplog.messages if message.startswith("label_smoothing_factor=0.1 has no effect")]
    assert len(said) == 1 and said[0].endswith("label_smoothing.")


def test_images_that_come_later_are_refused():
    trainer = build("dpo", [PAIR])
    with pytest.raises(ValueError, match="eval dataset has images"):
        trainer.evaluate(Dataset.from_list([{**PAIR, "images": [IMAGE]}]))
