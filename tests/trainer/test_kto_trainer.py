"""KTO: its numbers by hand, however a step is cut and laid out; references, evaluation, bad input."""

import logging

import pytest
import torch
from datasets import Dataset

from tests.tiny import tiny_seq2seq
from tests.trainer.dpo_runs import policy_and_reference
from tests.trainer.kto_runs import (
    LABELS,
    SPLITS,
    log_ratios,
    logps,
    make,
    rows,
)
from tests.trainer.one_step import assert_same_gradient, plain_gradient, step
from trl.trainer.kto_trainer import KTOTrainer

OWN = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
DESIRABLE = torch.tensor(LABELS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole():
    """The gradient and log of one step of one batch."""
    return step(make(**OWN))


def plain_loss(model, reference, given, *, kl, beta=0.3, weights=(1.3, 0.7)):
    """KTO's formula, row by row."""
    ratios = log_ratios(model, reference, given)
    losses = []
    for ratio, row in zip(ratios, given, strict=True):
        if row["label"]:
            losses.append(weights[0] * (1 - torch.sigmoid(beta * (ratio - kl))))
        else:
            losses.append(weights[1] * (1 - torch.sigmoid(beta * (kl - ratio))))
    return torch.stack(losses).mean(), ratios.detach()


def plain_kl(model, reference, given):
    """The mean log-ratio of the completions, each behind the prompt of the row after it."""
    return log_ratios(model, reference, given, shift=1).detach().mean().clamp(min=0)


# ---- the loss


def test_a_step_is_the_formula(whole):
    model, reference = policy_and_reference()
    kl = plain_kl(model, reference, rows())
    assert kl > 0.5  # the estimate is not cut at 0
    loss, ratios = plain_loss(model, reference, rows(), kl=kl)
    gradients, log = whole
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert_same_gradient(gradients, plain_gradient(model, loss))
    own = torch.stack([logps(model, row["prompt_input_ids"], row["completion_input_ids"]) for row in rows()])
    chosen, rejected = (0.3 * ratios[kind].mean().item() for kind in (DESIRABLE, ~DESIRABLE))
    expected = {
        "kl": kl.item(),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "logps/chosen": own[DESIRABLE].mean().item(),
        "logps/rejected": own[~DESIRABLE].mean().item(),
    }
    assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_apo_zero_compares_with_nothing():
    trainer = make(**OWN, loss_type="apo_zero_unpaired")
    assert "KL_completion_input_ids" not in trainer.train_dataset.column_names
    gradients, log = step(trainer)
    model, reference = policy_and_reference()
    loss, _ = plain_loss(model, reference, rows(), kl=torch.tensor(0.0))
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-6) and log["kl"] == 0
    assert_same_gradient(gradients, plain_gradient(model, loss))


def test_the_kl_is_at_least_zero():
    policy, reference = policy_and_reference()
    kl = log_ratios(reference, policy, rows(), shift=1).detach().mean()
    assert kl < 0  # the two the other way round
    _, log = step(make(model=reference.requires_grad_(True), ref_model=policy))
    assert log["kl"] == 0


# ---- one gradient, however a step is cut and laid out


def test_a_collator_without_masks_is_refused():
    trainer = make(data_collator=lambda rows: {"input_ids": torch.ones(2, 3, dtype=torch.int64)})
    with pytest.raises(ValueError, match="a batch must have prompt_input_ids"):
        trainer.train()


# ---- evaluation


def test_evaluation_compares_with_its_own_batch():
    trainer = make(eval_dataset=Dataset.from_list(rows()), per_device_eval_batch_size=3, **OWN)
    found = trainer.evaluate()
    model, reference = policy_and_reference()
    mismatched = log_ratios(model, reference, rows(), shift=1).detach()
    kls = [part.mean().clamp(min=0) for part in mismatched.split(3)]
    parts = [rows()[start : start + 3] for start in (0, 3, 6)]
    losses = [plain_loss(model, reference, part, kl=kl)[0] * len(part) for part, kl in zip(parts, kls, strict=True)]
    assert found["eval_loss"] == pytest.approx(sum(losses).item() / 8, rel=1e-6)
    assert found["eval_kl"] == pytest.approx(sum(kls).item() / 3, rel=1e-12)
    margins = found["eval_rewards/chosen"] - found["eval_rewards/rejected"]
    assert found["eval_rewards/margins"] == pytest.approx(margins)


def test_compute_metrics_gets_rewards_and_labels():
    seen = {}

    def compute_metrics(found):
        seen.update(rewards=found.predictions, labels=found.label_ids)
        return {"rows": len(found.predictions)}

    trainer = make(
        eval_dataset=Dataset.from_list(rows()), per_device_eval_batch_size=3, compute_metrics=compute_metrics
    )
    assert trainer.evaluate()["eval_rows"] == 8
    ratios = log_ratios(*policy_and_reference(), rows()).detach()
    assert seen["rewards"] == pytest.approx(0.1 * ratios.numpy(), rel=1e-10)
    assert seen["labels"].tolist() == [int(label) for label in LABELS]


# ---- references


def test_precomputed_log_probs_are_the_live_ones(whole):
    data = Dataset.from_list(rows())
    trainer = make(**OWN, precompute_ref_log_probs=True, eval_dataset=data, **SPLITS["2x4"])
    _, reference = policy_and_reference()
    for column, shift in (("reference_logps", 0), ("reference_KL_logps", 1)):
        expected = [
            logps(reference, row["prompt_input_ids"], rows()[index - shift]["completion_input_ids"]).item()
            for index, row in enumerate(rows())
        ]
        assert trainer.train_dataset[column] == pytest.approx(expected, rel=1e-10)
    gradients, log = step(trainer)
    assert_same_gradient(gradients, whole[0])
    assert log["kl"] == pytest.approx(whole[1]["kl"], rel=1e-12)
    with pytest.raises(ValueError, match="reference_logps and reference_KL_logps: the reference was asked"):
        trainer.evaluate(data)


# ---- encoder-decoders


def test_an_encoder_decoder():
    model, reference = (tiny_seq2seq("t5", dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.01)

    def of(model, row, other):
        labels = torch.tensor([other["completion_input_ids"]])
        logits = model(input_ids=torch.tensor([row["prompt_input_ids"]]), labels=labels).logits
        return logits.log_softmax(-1).gather(2, labels[..., None]).sum()

    given = rows()
    with torch.no_grad():
        own = torch.stack([of(model, row, row) - of(reference, row, row) for row in given])
        others = torch.stack(
            [of(model, row, given[i - 1]) - of(reference, row, given[i - 1]) for i, row in enumerate(given)]
        )
    whole = step(make(model=model, ref_model=reference))
    assert whole[1]["rewards/chosen"] == pytest.approx(0.1 * own[DESIRABLE].mean().item(), rel=1e-4)
    assert whole[1]["kl"] == pytest.approx(max(others.mean().item(), 0), rel=1e-4, abs=1e-6)


# ---- methods of 0.8-0.26


def test_older_methods(whole):
    trainer = make(**OWN)
    batch = trainer.data_collator(list(trainer.train_dataset))
    model, reference = policy_and_reference()
    ratios = log_ratios(model, reference, rows()).detach()
    ref_logps, ref_kl_logps = trainer.compute_reference_log_probs(dict(batch))
    chosen, rejected, chosen_logits, rejected_logits, kl_logps = trainer.forward(trainer.model, dict(batch))
    assert chosen.detach() - ref_logps[DESIRABLE] == pytest.approx(ratios[DESIRABLE], rel=1e-10)
    assert len(chosen_logits) == len(rejected_logits) == 4
    losses, chosen_rewards, _, kl = trainer.kto_loss(
        chosen, rejected, kl_logps, ref_logps[DESIRABLE], ref_logps[~DESIRABLE], ref_kl_logps
    )
    assert losses.mean().item() == pytest.approx(whole[1]["loss"], rel=1e-6)
    assert chosen_rewards.mean().item() == pytest.approx(whole[1]["rewards/chosen"], rel=1e-10)
    assert kl.item() == pytest.approx(whole[1]["kl"], rel=1e-10)
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model, dict(batch))
    assert loss.item() == pytest.approx(whole[1]["loss"], rel=1e-6)
    assert metrics["kl"] == pytest.approx(whole[1]["kl"], rel=1e-10)
    logits, labels = torch.randn(2, 4, 7), torch.tensor([[-100, 1, 2, 3], [-100, -100, 5, -100]])
    expected = logits.log_softmax(-1)[1, 1, 5].item()
    assert KTOTrainer.get_batch_logps(logits, labels)[1].item() == pytest.approx(expected, rel=1e-6)
    with trainer.null_ref_context() as same:
        assert same is trainer.model


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "bco"}, "kto"),
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size must be at least 2 for loss_type='kto', got 1"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True contradicts GPT2LMHeadModel"),
        ({"ref_adapter_name": "x", "copied_reference": True}, "ref_adapter_name=.x. must be an adapter"),
    ],
)  # fmt: skip
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_rows_in_blocks_are_said(caplog):
    ordered = sorted(rows(), key=lambda row: not row["label"])
    with caplog.at_level(logging.WARNING, logger="trl"):
        make(train_dataset=Dataset.from_list(ordered))
        assert "all desirable rows come before all others" in caplog.text
        caplog.clear()
        make(train_dataset=Dataset.from_list(ordered), train_sampling_strategy="random")
        assert "come before" not in caplog.text
