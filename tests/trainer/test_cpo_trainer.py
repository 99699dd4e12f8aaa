"""CPOTrainer: its loss is the papers' formulas, however rows are cut and laid out; its metrics, data and older interface."""

import dataclasses

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid

from tests.tiny import tiny_model
from tests.trainer.cpo_runs import TEXT, assert_step, make, plain
from tests.trainer.dpo_runs import pairs
from tests.trainer.one_step import assert_same_gradient, step
from trl.collators.preference import DPODataCollatorWithPadding
from trl.experimental.cpo import CPOConfig, CPOTrainer

LOSSES = {
    "sigmoid": {"beta": 0.3},
    "sigmoid, no likelihood": {"beta": 0.3, "cpo_alpha": 0.0},
    "smoothed": {"beta": 0.3, "label_smoothing": 0.2, "cpo_alpha": 0.7},
    "hinge": {"beta": 0.3, "loss_type": "hinge"},
    "ipo": {"beta": 0.3, "loss_type": "ipo"},
    "simpo": {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 1.2, "cpo_alpha": 0.0},
    "cpo-simpo": {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.5},
    "simpo, smoothed": {"beta": 2.0, "loss_type": "simpo", "label_smoothing": 0.1},
    "alphapo": {"beta": 0.5, "loss_type": "alphapo", "alpha": 0.25},
    "alphapo, negative alpha": {"beta": 0.5, "loss_type": "alphapo", "alpha": -0.5},
    "bent ipo": {"beta": 0.5, "loss_type": "ipo", "alpha": 0.2},
}
IN_TWOS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
LOGGED = {
    "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
    "logps/rejected", "logits/chosen", "logits/rejected", "nll_loss",
}  # fmt: skip


def formula(found, *, beta, loss_type="sigmoid", cpo_alpha=1.0, simpo_gamma=0.5, alpha=0.0, label_smoothing=0.0):
    """CPO's loss over all pairs from plain log-probs, as the papers write it, and its metrics."""
    per_token = loss_type in ("ipo", "simpo", "alphapo")
    chosen, rejected = found.totals(per_token=per_token)
    reward = (lambda logps: logps) if alpha == 0 else (lambda logps: (1 - torch.exp(-alpha * logps)) / alpha)
    gap = reward(chosen) - reward(rejected)
    if loss_type == "hinge":
        losses = torch.relu(1 - beta * gap)
    elif loss_type == "ipo":
        losses = (gap - 1 / (2 * beta)) ** 2
    else:
        logits = beta * gap - (0 if loss_type == "sigmoid" else simpo_gamma)
        losses = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    weight = 0.0 if loss_type == "alphapo" else cpo_alpha
    nll = -torch.cat(found.chosen).mean()
    metrics = {
        "rewards/chosen": beta * reward(chosen).mean(),
        "rewards/rejected": beta * reward(rejected).mean(),
        "rewards/margins": beta * gap.mean(),
        "rewards/accuracies": (gap > 0).double().mean(),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
        "logits/chosen": found.chosen_logits.mean(),
        "logits/rejected": found.rejected_logits.mean(),
        "nll_loss": nll if weight else torch.zeros(()),
    }
    return losses.mean() + weight * nll, {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_the_formula(name):
    assert_step(make, formula, LOSSES[name], LOGGED)


def padded(width):
    """A user's own collator: rows of `width` tokens, chosen and rejected in turn."""

    def collate(rows):
        both = [
            (row["prompt_input_ids"], row[side]) for row in rows for side in ("chosen_input_ids", "rejected_input_ids")
        ]
        columns = {
            "input_ids": [prompt + completion for prompt, completion in both],
            "labels": [[-100] * len(prompt) + completion for prompt, completion in both],
            "attention_mask": [[1] * len(prompt + completion) for prompt, completion in both],
        }
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            name: torch.tensor([row + [fill[name]] * (width - len(row)) for row in values])
            for name, values in columns.items()
        }

    return collate


@pytest.mark.parametrize("collator", [padded(16), padded(40), DPODataCollatorWithPadding()])
def test_own_collators_and_mean_logits_do_not_depend_on_padding(collator):
    settings = {"beta": 0.3, "data_collator": collator, **IN_TWOS}
    assert_step(make, formula, settings, LOGGED, expected=step(make(beta=0.3)))


def test_evaluation_is_the_formula():
    rows = pairs(seed=4)
    trainer = make(eval_dataset=Dataset.from_list(rows), per_device_eval_batch_size=3, beta=0.3)
    found = trainer.evaluate()
    loss, metrics = formula(plain(trainer.model, rows), beta=0.3)
    for name, value in {"loss": loss.item(), **metrics}.items():
        assert found[f"eval_{name}"] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_one_number_for_two_units_is_refused():
    trainer = make(beta=0.3)
    batch = next(iter(trainer.get_train_dataloader()))
    with pytest.raises(ValueError, match=r"num_items_in_batch .* pair, .*2"):
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=2)


def test_model_init_makes_the_model_once():
    made = []

    def model_init():
        made.append(tiny_model("gpt2", dtype=torch.float64))
        return made[-1]

    trainer = make(model_init=model_init, beta=0.3)
    trainer.train()
    assert len(made) == 1 and trainer.scorer.core is trainer.model
    assert_same_gradient(trainer.keep.steps[0], step(make(beta=0.3))[0], tolerance=0.0)


# ---- older programs


@pytest.mark.parametrize("name", ["sigmoid", "cpo-simpo", "bent ipo"])
def test_older_methods_give_the_same_loss(name):
    trainer = make(**LOSSES[name], prefix_sharing=True)
    batch = DPODataCollatorWithPadding()(pairs())
    expected, metrics = formula(plain(trainer.model, pairs()), **LOSSES[name])
    chosen, rejected, chosen_logits, _, nll = trainer.concatenated_forward(trainer.model, batch)
    losses, chosen_rewards, _ = trainer.cpo_loss(chosen, rejected)
    assert (losses.mean() + trainer.args.cpo_alpha * nll).item() == pytest.approx(expected.item(), rel=1e-12)
    assert chosen_rewards.mean().item() == pytest.approx(metrics["rewards/chosen"], rel=1e-12)
    assert chosen_logits.shape == (8, max(len(r["prompt_input_ids"]) + max(len(r["chosen_input_ids"]), len(r["rejected_input_ids"])) for r in pairs()), 96)  # fmt: skip
    loss, found = trainer.get_batch_loss_metrics(trainer.model, batch, train_eval="eval")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert found == pytest.approx({f"eval_{key}": value for key, value in metrics.items()}, rel=1e-12, abs=1e-12)
    loss.backward()


def test_log_probs_from_logits():
    rows = [trainer_row(row) for row in pairs()[:3]]
    batch = CPOTrainer.concatenated_inputs(DPODataCollatorWithPadding()(rows))
    assert batch["concatenated_input_ids"].shape == batch["concatenated_labels"].shape == (6, 11)
    model = tiny_model("gpt2", dtype=torch.float64)
    logits = model(
        input_ids=batch["concatenated_input_ids"], attention_mask=batch["concatenated_attention_mask"]
    ).logits
    found = plain(model, pairs()[:3])
    for average in (False, True):
        logps = CPOTrainer.get_batch_logps(logits, batch["concatenated_labels"], average_log_prob=average)
        expected = torch.cat(found.totals(per_token=average))
        assert logps.detach() == pytest.approx(expected.detach(), rel=1e-10)
    with pytest.raises(ValueError, match=r"must agree in rows and tokens, got \(6, 10, 96\)"):
        CPOTrainer.get_batch_logps(logits[:, 1:], batch["concatenated_labels"])


def trainer_row(row):
    """A tokenised pair with the columns of 0.7-0.26."""
    prompt, found = row["prompt_input_ids"], {}
    for side in ("chosen", "rejected"):
        completion = row[f"{side}_input_ids"]
        found[f"{side}_input_ids"] = prompt + completion
        found[f"{side}_labels"] = [-100] * len(prompt) + completion
    return found


def test_rows_and_answers_are_tokenised_as_for_training():
    trainer = make()
    row = trainer.tokenize_row(TEXT[0])
    assert row == {
        "chosen_input_ids": [3, 4, 5, 6, 7, 1],
        "chosen_attention_mask": [1] * 6,
        "chosen_labels": [-100, -100, -100, 6, 7, 1],
        "rejected_input_ids": [3, 4, 5, 8, 1],
        "rejected_attention_mask": [1] * 5,
        "rejected_labels": [-100, -100, -100, 8, 1],
        "prompt_input_ids": [3, 4, 5],
        "prompt_attention_mask": [1, 1, 1],
    }
    answer = trainer.build_tokenized_answer("w3 w4", " w5")
    assert answer == {
        "prompt_input_ids": [3, 4], "prompt_attention_mask": [1, 1], "input_ids": [5], "attention_mask": [1],
    }  # fmt: skip


# ---- bad input


def test_models_and_data_that_cannot_be_trained():
    with pytest.raises(ValueError, match="model and model_init were both given"):
        make(model=tiny_model("gpt2"), model_init=lambda: tiny_model("gpt2"))
    with pytest.raises(ValueError, match="is_encoder_decoder=True contradicts GPT2LMHeadModel"):
        make(is_encoder_decoder=True)
    with pytest.raises(ValueError, match="model must be a name, a path or a model, got None"):
        CPOTrainer(None, CPOConfig("out", use_cpu=True))
    with pytest.raises(ValueError, match="chosen"):
        make(train_dataset=Dataset.from_list([{"prompt": "w3", "rejected": "w4"}]))
    with pytest.raises(ValueError, match="prefix_sharing=True"):
        make(model=tiny_model("bloom"), prefix_sharing=True)


def test_alphapo_is_simpo_without_likelihood(tmp_path):
    args = CPOConfig(str(tmp_path), use_cpu=True, loss_type="alphapo", alpha=0.25)
    assert (args.loss_type, args.cpo_alpha, args.alpha) == ("simpo", 0.0, 0.25)
    again = dataclasses.replace(args, beta=2.0)
    assert (again.loss_type, again.cpo_alpha) == ("simpo", 0.0)
