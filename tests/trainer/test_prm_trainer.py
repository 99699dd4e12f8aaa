"""PRMTrainer: the mean over all labelled steps of an optimiser step, the model's own logits, heads that are kept.

float64; gradients agree to 1e-10 of the largest gradient, metrics to 1e-12 and the loss, which is logged in float32, to 1e-6.
"""

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
)

from tests.tiny import tiny_classifier
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.one_step import SETTINGS, assert_same_gradient, step, trainer_of
from tests.trainer.prm_runs import make, rows, step_classifier
from tests.trainer.resume_worker import tokenizer
from tests.trainer.test_reward_trainer import base, from_path  # noqa: F401
from tests.two_processes import launch
from trl.methods.prm import PRMMethod
from trl.reporting.metrics import compute_accuracy
from trl.trainer.prm_config import PRMConfig
from trl.trainer.prm_trainer import PRMTrainer, padded_steps

METRICS = ("loss", "accuracy", "num_tokens")
SOLUTIONS = [
    {"prompt": "What is 2 + 3 + 4?", "completions": ["2 + 3 is 5.", "5 + 4 is 9."], "labels": [True, True]},
    {"prompt": "What is 1 + 1 + 1?", "completions": ["1 + 1 is 2.", "2 + 1 is 4."], "labels": [True, False]},
    {"prompt": "What is 7 + 1?", "completions": ["7 + 1 is 9."], "labels": [False]},
] * 2


@pytest.fixture(scope="module")
def whole():
    return step(make())


def assert_same(found, expected):
    assert_same_gradient(found[0], expected[0])
    for name in METRICS:
        assert found[1][name] == pytest.approx(expected[1][name], rel=1e-6 if name == "loss" else 1e-12), name


def own_logits(model, data):
    """The logits `(B, T, 2)` of the model's own forward on padded rows, with labels and mask `(B, T)`."""
    width = max(len(row["input_ids"]) for row in data)

    def padded(values, fill):
        return torch.tensor([[*value, *[fill] * (width - len(value))] for value in values])

    ids, labels = padded([row["input_ids"] for row in data], 0), padded([row["labels"] for row in data], -100)
    mask = padded([[1] * len(row["input_ids"]) for row in data], 0)
    return model(input_ids=ids, attention_mask=mask).logits, labels, mask


# ---- one gradient


def test_a_plain_loop_gives_this_gradient(whole):
    """Nothing of ours: the mean cross-entropy over all labels, on padded rows."""
    model = step_classifier()
    logits, labels, mask = own_logits(model, rows())
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    assert_same_gradient(whole[0], {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    right = (logits.argmax(-1) == labels)[labels != -100].double().mean()
    assert whole[1]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert whole[1]["accuracy"] == pytest.approx(right.item(), rel=1e-12)
    assert whole[1]["num_tokens"] == mask.sum().item()


def test_rows_with_more_steps_count_more():
    """Rows with 3 and 1 labels: the loss is the mean over four steps, in one micro-batch or two (not a sum of means)."""
    data = [
        {"input_ids": [5, 6, 7, 8], "labels": [1, 0, -100, 1]},
        {"input_ids": [9, 4, 3, 3], "labels": [-100, -100, -100, 0]},
    ]
    model = step_classifier()
    logits, labels, _ = own_logits(model, data)
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
    for batch in (2, 1):
        trainer = make(
            train_dataset=Dataset.from_list(data), per_device_train_batch_size=batch,
            gradient_accumulation_steps=2 // batch,
        )  # fmt: skip
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.distributed
def test_predictions_of_two_processes(tmp_path):
    """Their batches are padded to widths of their own; the last one lacks rows."""
    out = tmp_path / "out.pt"
    launch("tests.trainer.prm_runs", str(out))
    found = torch.load(out, weights_only=False)
    trainer = make()
    trainer.train()
    alone = trainer.predict(Dataset.from_list(rows()[:7]))
    assert found["predictions"].shape[0] == 7
    is_step = alone.label_ids != -100
    width = is_step.shape[1]
    assert np.array_equal(found["labels"][:, :width], alone.label_ids)
    assert found["predictions"][:, :width][is_step] == pytest.approx(alone.predictions[is_step], rel=1e-9)


# ---- evaluation


@pytest.mark.parametrize("side", ["left", "right"])
def test_compute_metrics_gets_the_logits_of_every_position(side):
    padding, seen = tokenizer(), []
    padding.padding_side = side
    model = step_classifier()
    trainer = make(
        model=model, per_device_eval_batch_size=3, data_collator=DataCollatorForTokenClassification(padding),
        compute_metrics=lambda found: seen.append(found) or compute_accuracy(found),
    )  # fmt: skip
    result = trainer.evaluate(Dataset.from_list(rows()))
    logits, labels, mask = own_logits(model, rows())
    assert seen[0].predictions.shape == (8, 14, 2) and seen[0].label_ids.shape == (8, 14)
    expected = logits.detach()[labels != -100].numpy()
    assert seen[0].predictions[seen[0].label_ids != -100] == pytest.approx(expected, rel=1e-10)
    assert result["eval_accuracy"] == pytest.approx((expected.argmax(-1) == labels[labels != -100].numpy()).mean())  # fmt: skip
    if side == "right":
        found = torch.from_numpy(seen[0].predictions)[mask.bool()]
        torch.testing.assert_close(found, logits.detach()[mask.bool()], rtol=1e-10, atol=1e-10)
        assert seen[0].label_ids.tolist() == labels.tolist()


# ---- data


def text_trainer(data=SOLUTIONS, evaluation=None, **settings):
    model = tiny_classifier("llama", of_tokens=True, num_labels=2, vocab_size=400, pad_token_id=0)
    args = PRMConfig("unused", **{**SETTINGS, **settings})
    train = Dataset.from_list(data) if isinstance(data, list) else data
    return PRMTrainer(model, args, train_dataset=train, eval_dataset=evaluation, processing_class=tiny_tokenizer())


def test_the_last_step_alone_is_for_training_only():
    trainer = text_trainer(
        evaluation={"train": Dataset.from_list(SOLUTIONS)}, train_on_last_step_only=True, max_steps=1
    )

    def labels(data):
        return [[label for label in row if label != -100] for row in data["labels"]][:3]

    assert labels(trainer.train_dataset) == [[1], [0], [0]]
    assert labels(trainer.eval_dataset["train"]) == [[1, 1], [1, 0], [0]]


# ---- models


def compare(trainer, model):
    """The trainer's logits at the steps are those of a loaded model."""
    data = trainer.train_dataset
    predicted = trainer.predict(data)
    with torch.no_grad():
        logits, labels, _ = own_logits(model, data)
    found = torch.from_numpy(predicted.predictions)[labels != -100]
    torch.testing.assert_close(found, logits[labels != -100], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("task_type", ["TOKEN_CLS", "CAUSAL_LM"])
def test_an_adapter_trains_and_keeps_the_head(task_type, base, tmp_path, caplog):  # noqa: F811
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type=task_type)
    with caplog.at_level("WARNING"):
        trainer = from_path(base, tmp_path, (PRMTrainer, PRMConfig), SOLUTIONS, peft_config=config)
    assert ("peft_config has task_type=CAUSAL_LM" in caplog.text) == (task_type == "CAUSAL_LM")
    trained = [n for n, p in trainer.model.named_parameters() if p.requires_grad and "lora" not in n]
    assert sorted(name.rpartition(".")[2] for name in trained) == ["bias", "weight"]
    trainer.train()
    trainer.save_model()
    assert any("score" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    again = AutoModelForTokenClassification.from_pretrained(base, num_labels=2)
    compare(trainer, PeftModel.from_pretrained(again, tmp_path))


# ---- bad input


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="step_separator must be"):
        PRMConfig("unused", step_separator="")
    with pytest.raises(ValueError, match="model and model_init were both given"):
        make(model_init=step_classifier)


def test_what_model_init_makes_follows_from_the_seed():
    def drawn():
        model = step_classifier()
        torch.nn.init.normal_(model.classifier.weight)
        return model

    weights = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        weights.append(make(model=None, model_init=drawn).model.classifier.weight)
    assert torch.equal(*weights)


def test_a_subclass_with_a_method_and_a_layout_of_its_own(tmp_path):
    calls = set()

    class Terms(PRMMethod):
        def terms(self, *args):
            calls.add("terms")
            return super().terms(*args)

    class Own(PRMTrainer):
        method = Terms()

        def layout(self, batch):
            calls.add("layout")
            return padded_steps(self.scorer, batch)

    trainer_of(Own, PRMConfig, tmp_path, {}, model=step_classifier(), train_dataset=Dataset.from_list(rows())).train()
    assert calls == {"terms", "layout"}
