"""Log-probs and values in one forward, packed or padded, equal those of the model's own forward; gradients too."""

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig

from tests.tiny import tiny_classifier, tiny_model, tiny_seq2seq
from trl.collators.preference import seq2seq_batch
from trl.models.scoring.classifier import ClassificationScorer
from trl.models.scoring.encoder_decoder import language_scorer
from trl.models.value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

BATCH = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]]),
    "attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]),
    "labels": torch.tensor([[-100, -100, 7, 8, 9, 10], [-100, 12, 13, 14, -100, -100]]),
}


def wrapped(architecture="gpt2", **settings):
    inner = tiny_model(architecture, dtype=torch.float64)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(inner, summary_dropout_prob=0.0, **settings)
    model.v_head.double()
    return model.eval()


def own(model):
    """Log-probs and values of the labels from the model's own logits, row by row."""
    logits, _, values = model(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"])
    labels = BATCH["labels"][:, 1:]
    logps = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return logps[labels != -100], values[:, :-1][labels != -100]


def loss_of(logps, values):
    return (logps * torch.linspace(-1, 2, len(logps), dtype=logps.dtype)).sum() + values.square().sum()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [None, False])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bloom"])
def test_log_probs_values_and_gradients(architecture, packed):
    model = wrapped(architecture)
    plain = copy.deepcopy(model)
    expected = own(plain)
    scorer = language_scorer(model, packed=packed)
    assert scorer.packed == (packed is None and architecture != "bloom")
    scored = scorer.score(model, BATCH)
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if architecture != "llama" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close((scored.logps, scored.values), expected, **tolerance)
    assert scored.positions.sequence.tolist() == [0, 0, 0, 0, 1, 1, 1]
    found, wanted = (
        gradients(model, loss_of(scored.logps, scored.values)),
        gradients(plain, loss_of(*expected)),
    )
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, **{key: 10 * x for key, x in tolerance.items()}, msg=name)


def test_logits_come_with_values_on_request():
    model = wrapped()
    scored, logits = language_scorer(model).score_with_logits(model, BATCH)
    expected = own(model)
    torch.testing.assert_close((scored.logps, scored.values), expected, rtol=1e-9, atol=1e-10)
    assert logits.shape == (2, 6, 96)


@pytest.mark.parametrize(
    "config",
    [LoraConfig(task_type="CAUSAL_LM", r=4), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)],
)
def test_adapters(config):
    model = wrapped(peft_config=config)
    scorer = language_scorer(model)
    scored = scorer.score(model, BATCH)
    assert scored.values is not None
    assert scorer.uses_head == isinstance(config, LoraConfig)
    width = BATCH["input_ids"].shape[1]
    _, _, values = model(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"])
    labels = BATCH["labels"][:, 1:]
    torch.testing.assert_close(scored.values, values[:, -width:][:, :-1][labels != -100], rtol=1e-9, atol=1e-10)
    scored.values.sum().backward()
    assert any("v_head" not in name for name, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_encoder_decoders(architecture):
    inner = tiny_seq2seq(architecture, dtype=torch.float64)
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(inner, summary_dropout_prob=0.0)
    model.v_head.double()
    model.eval()
    rows = [
        {"prompt_input_ids": [5, 6, 7, 1], "completion_input_ids": [7, 3, 9, 1]},
        {"prompt_input_ids": [9, 1], "completion_input_ids": [4, 1]},
    ]
    batch = seq2seq_batch(rows, completions=("completion_input_ids",))
    scored = language_scorer(model).score(model, batch)
    logits, _, values = model(
        batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["decoder_labels"]
    )
    labels = batch["decoder_labels"]
    logps = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(scored.values, values[labels != -100], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(scored.logps, logps[labels != -100], rtol=1e-9, atol=1e-10)


def test_a_value_model_of_its_own_scores_the_same_positions():
    """A reward-model-like network gives values where the policy's tokens are predicted."""
    model = tiny_classifier("gpt2", dtype=torch.float64, num_labels=1)
    values, positions = ClassificationScorer(model).score_predictors(model, BATCH)
    hidden = model.base_model(BATCH["input_ids"], attention_mask=BATCH["attention_mask"]).last_hidden_state
    expected = model.score(hidden)[:, :-1][BATCH["labels"][:, 1:] != -100]
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-10)
    assert positions.sequence.tolist() == [0, 0, 0, 0, 1, 1, 1]
