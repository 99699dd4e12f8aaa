"""PAPO: what is added to GRPO on images, and what stays: splits, resuming, evaluation, errors."""

import pytest
import torch
from datasets import Dataset

from tests.tiny_vision import tiny_processor
from tests.trainer.grpo_runs import TRAINERS, logs
from tests.trainer.image_prompt_runs import make as make_run
from tests.trainer.image_prompt_runs import rows
from tests.trainer.one_step import assert_same_steps
from trl.experimental.papo import PAPOConfig, PAPOTrainer
from trl.models.scoring.head import ScoreOptions
from trl.objectives.kl import k3

TRAINERS["papo"] = (PAPOConfig, PAPOTrainer)
SETTINGS = {"mask_type": "patch", "mask_ratio": 0.5, "max_completion_length": 4}


def make(**settings):
    return make_run("papo", **{**SETTINGS, **settings})


def run(**settings):
    trainer, keep = make(**settings)
    trainer.train()
    return trainer, keep


def test_a_step_hides_half_of_each_image_and_adds_the_divergence_and_the_entropies():
    trainer, _ = make(dtype="float64", loss_type="grpo", beta=0.0, perception_loss_weight=0.2, der_loss_weight2=0.5)
    experience = trainer.make_rollout_batch(0)
    batch = trainer.micro_batch(experience)
    whole, masked = batch["pixel_values"].chunk(2)
    assert len(batch["input_ids"]) == 16 and (whole != masked).any()
    terms = trainer.outcome(trainer.model, batch).terms
    with torch.no_grad():  # the two halves by themselves
        parts = []
        for half in (0, 1):
            own = {name: value.chunk(2)[half] for name, value in batch.items() if name not in ("experience", "rows")}
            parts.append(trainer.scorer.score(trainer.model, own, ScoreOptions(entropy="scored")))
    (own, hidden), lengths = parts, experience.completions.lengths
    values = -0.2 * k3(own.logps, hidden.logps) + 0.03 * own.entropies + 0.5 * hidden.entropies
    expected = torch.stack([row.mean() for row in values.split(lengths.tolist())])
    torch.testing.assert_close(terms[1].values, expected, rtol=0, atol=1e-10)
    assert k3(own.logps, hidden.logps).mean() > 1e-3
    assert terms[0].values.shape == terms[1].values.shape == (8,)


def test_weights_of_zero_leave_grpo():
    none = {"perception_loss_weight": 0.0, "der_loss_weight1": 0.0, "der_loss_weight2": 0.0}
    _, found = run(dtype="float64", max_steps=2, loss_type="grpo", **none)
    trainer, keep = make_run(dtype="float64", max_steps=2, loss_type="grpo", max_completion_length=4)
    trainer.train()
    assert_same_steps(found.steps, keep.steps)


def test_splits_into_micro_batches():
    settings = {"dtype": "float64", "max_steps": 3, "num_iterations": 2, "top_entropy_quantile": 0.5}
    trainer, expected = run(**settings)
    other, found = run(**settings, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_same_steps(found.steps, expected.steps)
    for name in ("perception_kl", "masked_entropy", "entropy", "loss"):
        assert logs(other)[-1][name] == pytest.approx(logs(trainer)[-1][name], abs=1e-6), name


def test_a_run_goes_on_to_the_same_bits_with_the_same_masks(tmp_path):
    settings = {
        "num_iterations": 2,
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 3,
        "mask_type": "random",
    }
    whole, _ = run(folder=str(tmp_path / "whole"), **settings)
    again, _ = make(folder=str(tmp_path / "again"), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert logs(again)[-1] == logs(whole)[-1]


@torch.no_grad()
def divergence(trainer):
    """KL of the first token's distribution from that behind black images, exact, mean over two prompts."""
    found = []
    for row in (0, 1):
        ids = trainer.rollouts.prompts.rows["input_ids"][row]
        logps = []
        for change in (None, lambda row, key, images: trainer._masked(key, images)):
            seen = trainer.images.model_inputs([(row, len(ids))], [len(ids)], len(ids), change)
            logits = trainer.model.eval()(input_ids=torch.tensor([ids]), **seen).logits
            logps.append(logits[0, -1].log_softmax(dim=0))
        found.append(float((logps[0].exp() * (logps[0] - logps[1])).sum()))
    return sum(found) / 2


def test_the_loss_of_an_evaluation_is_the_sum_of_its_terms():
    """Without a difference in reward and without a reference, what is left is the perception loss and the entropies."""
    trainer, _ = make(
        dtype="float64",
        beta=0.0,
        loss_type="bnpo",
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
    )
    found = trainer.evaluate(Dataset.from_list(rows()))
    entropies = found["eval_entropy"] + found["eval_masked_entropy"]
    assert found["eval_loss"] == pytest.approx(-0.1 * found["eval_perception_kl"] + 0.03 * entropies, abs=1e-8)


def test_evaluation_and_what_is_refused():
    trainer, _ = make()
    metrics = trainer.evaluate(Dataset.from_list(rows()[:2]))
    assert metrics["eval_perception_kl"] > 0 and "eval_loss" in metrics
    text = [{"prompt": row["prompt"]} for row in rows()]
    for others in ({}, {"eval_dataset": Dataset.from_list(rows())}):
        with pytest.raises(ValueError, match="train_dataset has no column of images"):
            make(data=Dataset.from_list(text), given={"processing_class": tiny_processor("llava"), **others})
