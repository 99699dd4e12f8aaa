"""Rows that no method can learn from are refused before the first step, by every trainer, in an error that names the column.

What is refused of each kind of row is tested with the data preparation (`tests/data`), settings with their method.
"""

import dataclasses
import math
import tempfile
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset

from tests.experimental import ppo_runs
from tests.tiny import tiny_classifier, tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer import grpo_runs
from trl import (
    BCOConfig,
    BCOTrainer,
    CPOConfig,
    CPOTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    PRMConfig,
    PRMTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


class Kind(NamedTuple):
    """A good row of a kind, and the column that is spoilt."""

    row: dict[str, Any]
    column: str


ASK, UP, NEXT = ({"role": "user", "content": "And then?"}, *({"role": "assistant", "content": text} for text in ("Look up.", "Next.")))  # fmt: skip
TEXT = Kind({"prompt": "The sky is", "completion": " blue"}, "completion")
PAIR = Kind({"prompt": "The sky is", "chosen": " blue", "rejected": " brown"}, "chosen")
RATED = Kind({"prompt": "The sky is", "completion": " blue", "label": True}, "completion")
STEPS = Kind({"prompt": "How many?", "completions": ["Seven apples.", "Next."], "labels": [True, False]}, "completions")
PROMPT = Kind({"prompt": "Why?"}, "prompt")
TRAINERS: dict[str, tuple[Any, Any, Kind]] = {
    "sft": (SFTTrainer, SFTConfig, TEXT),
    "dpo": (DPOTrainer, DPOConfig, PAIR),
    "cpo": (CPOTrainer, CPOConfig, PAIR),
    "orpo": (ORPOTrainer, ORPOConfig, PAIR),
    "reward": (RewardTrainer, RewardConfig, PAIR),
    "kto": (KTOTrainer, KTOConfig, RATED),
    "bco": (BCOTrainer, BCOConfig, RATED),
    "prm": (PRMTrainer, PRMConfig, STEPS),
}
KINDS = {
    **{method: kind for method, (*_, kind) in TRAINERS.items()},
    **dict.fromkeys(("grpo", "rloo", "ppo"), PROMPT),
}


def model_of(method: str) -> Any:
    if method == "reward":
        return tiny_classifier("llama", vocab_size=400, num_labels=1)
    if method == "prm":
        return tiny_classifier("llama", vocab_size=400, num_labels=2, of_tokens=True)
    return tiny_model("llama", vocab_size=400)


def build(method: str, data: Any, *, template: str = "chatml") -> Any:
    if method == "ppo":
        return ppo_runs.make(data=data)[0]
    given = {"model": model_of(method), "processing_class": tiny_tokenizer(template)}
    if method in ("grpo", "rloo"):
        return grpo_runs.make(method, data=data, given=given)[0]
    trainer, config, _ = TRAINERS[method]
    args = config(tempfile.mkdtemp(), use_cpu=True, report_to="none", max_steps=2, gradient_checkpointing=False)
    return trainer(args=args, train_dataset=data, **given)


def refuse(method: str, data: Any, error: type[Exception], *words: str, **given: Any) -> None:
    with pytest.raises(error) as caught:
        build(method, data, **given)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("method", KINDS)
def test_a_missing_column(method):
    row, column = KINDS[method]
    rows = [{**{name: value for name, value in row.items() if name != column}, "other": "a"}]
    refuse(method, Dataset.from_list(rows), ValueError, f"'{column}'", "'other'")


@pytest.mark.parametrize("method", KINDS)
def test_a_number_for_a_text(method):
    row, column = KINDS[method]
    rows = [{**row, column: [3, 4] if column == "completions" else 3}]
    refuse(method, Dataset.from_list(rows), TypeError, "train dataset, row 0", column, "3 is of type int")


@pytest.mark.parametrize("value", ["", None])
@pytest.mark.parametrize("method", KINDS)
def test_an_empty_text(method, value):
    row, column = KINDS[method]
    spoilt = ["Seven apples.", value] if column == "completions" else value
    data = Dataset.from_list([row, {**row, column: spoilt}])
    refuse(method, data, ValueError, "train dataset, row 1", f"column '{column}", "ilter the row out")


@pytest.mark.parametrize("method", KINDS)
def test_no_rows_and_no_data_set(method):
    row, _ = KINDS[method]
    refuse(method, Dataset.from_dict({name: [] for name in row}), ValueError, "train dataset", "no rows")
    if method not in ("grpo", "rloo", "ppo"):  # these take lists of rows
        refuse(method, [row], TypeError, "train_dataset must be", "got list")


@pytest.mark.parametrize("method", KINDS)
def test_rows_that_a_transform_makes(method):
    data = Dataset.from_list([KINDS[method].row] * 2)
    for rows in (data, data.rename_columns({name: f"{name}_of_file" for name in data.column_names})):
        refuse(
            method, rows.with_transform(lambda batch: batch), ValueError, "train dataset has a transform",
            ".map(transform, batched=True",
        )  # fmt: skip


ONLINE = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
    "ppo": (PPOTrainer, PPOConfig),
}
SETTINGS = {
    "learning_rate": -1.0, "per_device_train_batch_size": 0, "max_length": 0, "max_prompt_length": 0, "beta": math.nan,
    "temperature": 0, "loss_type": "other", "num_generations": 1, "no_such_setting": 1,
}  # fmt: skip
ARGUMENTS = (
    "args",
    "processing_class",
    "train_dataset",
    "eval_dataset",
    "peft_config",
    "no_such_argument",
    "model",
)


@pytest.mark.parametrize("method", KINDS)
def test_the_types_of_errors(method):
    """A value that is not allowed is a ValueError, one of another type and an unknown name are TypeErrors."""
    trainer, config, *_ = ONLINE.get(method) or TRAINERS[method]
    fields = {field.name for field in dataclasses.fields(config)}
    for name, value in SETTINGS.items():
        with pytest.raises(ValueError if name in fields else TypeError, match=name):
            config(tempfile.mkdtemp(), use_cpu=True, **{name: value})
    args = config(tempfile.mkdtemp(), use_cpu=True, report_to="none", max_steps=2)
    data = Dataset.from_list([KINDS[method].row] * 8)
    given = {
        "model": model_of(method),
        "args": args,
        "processing_class": tiny_tokenizer(),
        "train_dataset": data,
    }
    given |= {"reward_funcs": grpo_runs.even_tokens} if method in ONLINE else {}
    given |= {"value_model": tiny_classifier("llama", vocab_size=400, num_labels=1)} if method == "ppo" else {}
    other = (GRPOConfig if method == "sft" else SFTConfig)(tempfile.mkdtemp(), use_cpu=True)  # of another method
    with pytest.raises(TypeError, match=rf"{config.__name__}, got [\w.]*{type(other).__name__}\. "):
        trainer(**{**given, "args": other, "model": "no/such-model"})
    for name, value, error in [*((name, 3, TypeError) for name in ARGUMENTS), ("model", None, ValueError)]:
        with pytest.raises(error, match=name.replace("_", "[ _]")) as caught:
            trainer(**{**given, name: value})
        assert type(caught.value) is error, name


MESSAGES = {
    "completion": {"prompt": [ASK], "completion": [UP], "label": True},
    "chosen": {"prompt": [ASK], "chosen": [UP], "rejected": [NEXT]},
    "prompt": {"prompt": [ASK]},
}


@pytest.mark.parametrize("method", [name for name in KINDS if name not in ("prm", "ppo")])
def test_messages_without_a_chat_template(method):
    row = MESSAGES[KINDS[method].column]
    refuse(method, Dataset.from_list([row] * 2), ValueError, "no chat template", template="none")


@pytest.mark.parametrize("method", TRAINERS)
def test_a_loss_that_is_not_finite(method):
    """The run ends before the weights are changed."""
    trainer = build(method, Dataset.from_list([KINDS[method].row] * 16))
    spoilt, norm = next(named for named in trainer.model.named_parameters() if "norm" in named[0])
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if name != spoilt}
    with torch.no_grad():
        norm.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="step 1"):
        trainer.train()
    weights = dict(trainer.model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in before.items())
    assert trainer.state.global_step == 0
