"""BCO: its numbers by hand, however a step is cut; the running delta, prompt matching, resumption, bad input."""

import sys

import pytest
import torch
from datasets import Dataset

from tests.trainer.dpo_runs import policy_and_reference
from tests.trainer.kto_runs import (
    LABELS,
    MATCHED,
    PROMPTS,
    embed,
    log_ratios,
    rows,
)
from tests.trainer.kto_runs import make_bco as make
from tests.trainer.one_step import assert_same_gradient, plain_gradient, step
from tests.trainer.resume_worker import tokenizer

BETA = 0.3
DESIRABLE = torch.tensor(LABELS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole():
    """The gradient and log of one step of one batch."""
    return step(make(beta=BETA))


def plain_loss(ratios, delta, weights=None):
    """BCO's formula, row by row."""
    weights = [1.0] * len(ratios) if weights is None else weights
    losses = []
    for ratio, label, weight in zip(ratios, LABELS, weights, strict=False):
        logit = BETA * ratio - delta
        losses.append(-logit.sigmoid().log() if label else -weight * (-logit).sigmoid().log())
    return torch.stack(losses).mean()


# ---- the loss and the shift


def test_a_step_is_the_formula(whole):
    model, reference = policy_and_reference()
    ratios = log_ratios(model, reference, rows())
    delta = BETA * ratios.detach().mean()
    loss = plain_loss(ratios, delta)
    gradients, log = whole
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert log["delta"] == pytest.approx(delta.item(), rel=1e-12)
    chosen, rejected = (BETA * ratios.detach()[kind].mean().item() for kind in (DESIRABLE, ~DESIRABLE))
    found = [log[f"rewards/{name}"] for name in ("chosen", "rejected", "margins")]
    assert found == pytest.approx([chosen, rejected, chosen - rejected], rel=1e-12)
    assert_same_gradient(gradients, plain_gradient(model, loss))


def test_delta_is_the_mean_reward_of_the_run():
    """Of all completions up to and including the step's, however many each step had."""
    trainer = make(per_device_train_batch_size=3, max_steps=3, learning_rate=0.0, beta=BETA)
    trainer.train()
    rewards = BETA * log_ratios(*policy_and_reference(), rows()).detach()
    found = [entry["delta"] for entry in trainer.state.log_history if "delta" in entry]
    assert found == pytest.approx([rewards[:3].mean().item(), rewards[:6].mean().item(), rewards.mean().item()])


def test_delta_forgets_an_earlier_run():
    trainer = make(per_device_train_batch_size=3, max_steps=2, learning_rate=0.0, beta=BETA)
    runs = []
    for _ in range(2):
        trainer.train()
        runs.append([entry["delta"] for entry in trainer.state.log_history if "delta" in entry])
    assert runs[0] == runs[1]


def test_an_evaluation_does_not_move_delta():
    trainer = make(beta=BETA, eval_dataset=Dataset.from_list(rows()), per_device_eval_batch_size=3)
    assert trainer.evaluate()["eval_delta"] == 0
    trainer.train()
    (delta,) = (entry["delta"] for entry in trainer.state.log_history if "delta" in entry)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_delta"] == second["eval_delta"] == pytest.approx(delta)
    ratios = log_ratios(trainer.model, trainer.ref_model, rows()).detach()
    assert first["eval_loss"] == pytest.approx(plain_loss(ratios, delta).item(), rel=1e-6)


# ---- underlying-distribution matching


def test_undesirable_rows_weigh_by_their_prompts():
    linear_model = pytest.importorskip("sklearn.linear_model")
    ids = [torch.tensor([list(prompt)]) for prompt in PROMPTS]
    embeddings = torch.cat([embed(input_ids=row, attention_mask=torch.ones_like(row)) for row in ids]).numpy()
    classifier = linear_model.LogisticRegression(class_weight="balanced").fit(embeddings, LABELS)
    probability = torch.from_numpy(classifier.predict_proba(embeddings)[:, 1])
    weights = (probability / (1 - probability)).clamp(0.5, 10)
    assert weights.unique().numel() > 3
    model, reference = policy_and_reference()
    ratios = log_ratios(model, reference, rows())
    loss = plain_loss(ratios, BETA * ratios.detach().mean(), weights)
    gradients, log = step(make(**MATCHED))
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)  # the two fits stop at their own tolerance
    assert_same_gradient(gradients, plain_gradient(model, loss), tolerance=1e-4)


def test_matching_from_text():
    row = {"prompt": "w5", "completion": "w7", "label": True}
    data = Dataset.from_list([row, {**row, "prompt": "w50", "label": False}] * 4)
    trainer = make(matched=True, train_dataset=data)
    assert trainer.train_dataset["embedding_input_ids"][0] == [5]
    trainer.train()


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding_func": embed}, "embedding_func needs an embedding_tokenizer"),
        ({"embedding_tokenizer": tokenizer()}, "embedding_tokenizer without embedding_func"),
        ({"embedding_func": embed, "embedding_tokenizer": tokenizer()}, "add 'embedding_input_ids'"),
        ({**MATCHED, "train_dataset": None}, "embedding_func without train_dataset"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match=r"pip install 'trl\[bco\]'"):
        make(**MATCHED)


# ---- learning


# ---- methods of 0.11-0.26


def test_older_methods():
    trainer = make(beta=0.3)
    _, log = step(make(beta=0.3))
    batch = trainer.data_collator(list(trainer.train_dataset))
    chosen = batch["label"]
    ref_logps = trainer.compute_reference_log_probs(batch)
    logps, rejected_logps, logits, rejected_logits = trainer.forward(trainer.model, batch)
    assert logits.shape[0] == len(logps) == 4 and rejected_logits.shape[0] == 4
    found = trainer.bco_loss(logps, rejected_logps, ref_logps[chosen], ref_logps[~chosen], None, None)
    losses, chosen_rewards, rejected_rewards, delta = found
    assert losses.mean().item() == pytest.approx(log["loss"], rel=1e-6)
    assert delta.item() == pytest.approx(log["delta"], rel=1e-6)
    assert chosen_rewards.mean().item() == pytest.approx(log["rewards/chosen"], rel=1e-6)
    assert rejected_rewards.mean().item() == pytest.approx(log["rewards/rejected"], rel=1e-6)
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch, do_train=False)
    assert loss.item() == pytest.approx(log["loss"], rel=1e-6)
    assert metrics["delta"] == pytest.approx(log["delta"], rel=1e-6) and trainer.method.mean_reward.count == 8
    trainer.get_batch_loss_metrics(trainer.model.train(), batch)
    assert trainer.method.mean_reward.count == 16
    loss.backward()
    assert not trainer.match_underlying_distribution
    with trainer.null_ref_context() as same:
        assert same is trainer.model
    prompts = torch.tensor([[5, 6, 7], [8, 9, 10]])
    trainer.args.max_length = 12
    asked = {"prompt_input_ids": prompts, "prompt_attention_mask": torch.ones_like(prompts)}
    policy, reference = trainer.generate_from_model_and_ref(trainer.model, asked)
    assert len(policy) == len(reference) == 2
    assert type(trainer).get_batch_logps(logits[:1], torch.full(logits.shape[1:2], 3)[None]).shape == (1,)
