"""Programs of 0.4-0.26: the older call, the older collator, and the methods that were called on a trainer."""

import tempfile

import pytest
import torch
from datasets import Dataset
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import TrainingArguments

from tests.tiny_vision import tiny_image, tiny_processor
from tests.trainer import dpo_plain
from tests.trainer.dpo_runs import make, pairs, policy_and_reference
from tests.trainer.one_step import SETTINGS, KeepGradients
from tests.trainer.resume_worker import tokenizer
from trl import DPOConfig, DPOTrainer
from trl.collators.preference import DPODataCollatorWithPadding
from trl.objectives.preference import PAIR_LOSSES

ROWS = pairs()
TEXTS = [
    {"prompt": "w5 w6 w7", "chosen": "w8 w9", "rejected": "w10"},
    {"prompt": "w11", "chosen": "w12", "rejected": "w13 w14 w15 w16"},
    {"prompt": "w17 w18", "chosen": "w19 w20 w21", "rejected": "w22 w23"},
    {"prompt": "w24 w25 w26 w27", "chosen": "w28", "rejected": "w29"},
]
SOME = {**SETTINGS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}


def words():
    found = tokenizer()
    found.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    return found


def run(build):
    policy, reference = policy_and_reference()
    keep = KeepGradients()
    trainer = build(policy, reference, keep)
    trainer.train()
    return trainer, keep


def new_call(collator=None, **settings):
    def build(policy, reference, keep):
        args = DPOConfig(
            tempfile.mkdtemp(), **{**SOME, "max_length": 7, "max_prompt_length": 3, "beta": 0.2, **settings}
        )
        return DPOTrainer(
            policy, reference, args, data_collator=collator, train_dataset=Dataset.from_list(TEXTS),
            processing_class=words(), callbacks=[keep],
        )  # fmt: skip

    return run(build)


def assert_same_steps(found, expected):
    assert len(found.steps) == len(expected.steps) == 3
    for one, other in zip(found.steps, expected.steps, strict=True):
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient, rtol=0, atol=1e-12)


# ---- the call


@pytest.mark.parametrize("with_collator", [False, True])
def test_the_call_of_0_4_trains_to_the_same_numbers(with_collator):
    plain = {name: value for name, value in SOME.items() if name != "disable_tqdm"}

    def build(policy, reference, keep):
        return DPOTrainer(
            policy,
            reference,
            beta=0.2,
            args=TrainingArguments(tempfile.mkdtemp(), remove_unused_columns=False, bf16=False, **plain),
            tokenizer=words(),
            data_collator=DPODataCollatorWithPadding(pad_token_id=0) if with_collator else None,
            train_dataset=Dataset.from_list(TEXTS),
            max_length=7,
            max_prompt_length=3,
            max_target_length=4,
            callbacks=[keep],
        )

    with pytest.warns(FutureWarning, match=r"beta -> DPOConfig\(beta=...\).*max_target_length"):
        trainer, keep = run(build)
    assert isinstance(trainer.args, DPOConfig)
    assert (trainer.args.beta, trainer.args.max_length, trainer.args.max_prompt_length) == (0.2, 7, 3)
    assert trainer.args.max_completion_length == 4
    _, expected = new_call(max_completion_length=4)
    assert_same_steps(keep, expected)


# ---- batches


def batches(rows=ROWS, **settings):
    trainer = make(**settings)
    padded = DPODataCollatorWithPadding()([dict(row) for row in rows])
    return trainer, trainer.data_collator(rows), padded


def whole_sequences(rows):
    """Columns of 0.4-0.11: sequences with labels that are -100 on the prompt."""
    made = []
    for row in rows:
        found = {"prompt_input_ids": row["prompt_input_ids"]}
        for side in ("chosen", "rejected"):
            prompt, completion = row["prompt_input_ids"], row[f"{side}_input_ids"]
            found[f"{side}_input_ids"] = prompt + completion
            found[f"{side}_labels"] = [-100] * len(prompt) + completion
        made.append(found)
    return DPODataCollatorWithPadding()(made)


def test_every_form_of_a_batch_gives_the_same_numbers():
    trainer, own, padded = batches()
    expected = trainer.get_batch_loss_metrics(trainer.model, own)
    for batch in (padded, whole_sequences(ROWS)):
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
        assert loss.item() == pytest.approx(expected[0].item(), rel=1e-12)
        assert metrics == pytest.approx(expected[1], rel=1e-12)


def test_concatenated_inputs_of_both_levels():
    _, _, padded = batches()
    found = DPOTrainer.concatenated_inputs(padded, padding_value=0)
    rows = len(ROWS)
    assert set(found) == {
        "prompt_input_ids", "prompt_attention_mask", "completion_input_ids", "completion_attention_mask",
    }  # fmt: skip
    assert found["prompt_input_ids"].shape == (2 * rows, 7)
    assert torch.equal(found["prompt_input_ids"][:rows], found["prompt_input_ids"][rows:])
    for index, row in enumerate(ROWS):
        for offset, side in ((0, "chosen"), (rows, "rejected")):
            mask = found["completion_attention_mask"][offset + index].bool()
            assert found["completion_input_ids"][offset + index][mask].tolist() == row[f"{side}_input_ids"]
    older = DPOTrainer.concatenated_inputs(whole_sequences(ROWS), label_pad_token_id=-100, padding_value=9)
    assert set(older) == {
        "concatenated_input_ids", "concatenated_attention_mask", "concatenated_labels",
    }  # fmt: skip
    assert older["concatenated_labels"].shape == older["concatenated_input_ids"].shape == (2 * rows, 11)
    assert int((older["concatenated_labels"] != -100).sum()) == sum(
        len(row["chosen_input_ids"]) + len(row["rejected_input_ids"]) for row in ROWS
    )


# ---- the forward and the loss


@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_concatenated_forward(name):
    trainer, own, padded = batches(loss_type=[name, "sft"], use_weighting=True)
    mean = name == "ipo"
    chosen, rejected, ref_chosen, ref_rejected = dpo_plain.pairs(trainer.model, trainer.ref_model, ROWS, mean=mean)
    for batch in (own, padded):
        found = trainer.concatenated_forward(trainer.model, batch)
        assert set(found) == {
            "chosen_logps", "rejected_logps", "mean_chosen_logits", "mean_rejected_logits", "nll_loss",
            "policy_weights",
        }  # fmt: skip
        torch.testing.assert_close(found["chosen_logps"], chosen, rtol=1e-10, atol=0)
        torch.testing.assert_close(found["rejected_logps"], rejected, rtol=1e-10, atol=0)
        for is_ref_model in (True, False):
            other = trainer.concatenated_forward(trainer.ref_model, batch, is_ref_model=is_ref_model)
            torch.testing.assert_close(other["chosen_logps"], ref_chosen, rtol=1e-10, atol=0)
        for value, expected in zip(trainer.compute_ref_log_probs(batch), (ref_chosen, ref_rejected), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["nll_loss"] == pytest.approx(float(found["nll_loss"].detach()), rel=1e-10)
    assert log["logits/chosen"] == pytest.approx(float(found["mean_chosen_logits"]), rel=1e-10)


@pytest.mark.parametrize("name", [name for name in PAIR_LOSSES if name != "sft"])
def test_dpo_loss_is_the_trainers_own(name):
    trainer, own, _ = batches(loss_type=name, beta=0.3)
    output = trainer.concatenated_forward(trainer.model, own)
    logps = (output["chosen_logps"], output["rejected_logps"], *trainer.compute_ref_log_probs(own))
    losses, chosen, rejected = trainer.dpo_loss(*logps, name)
    older = dict(
        zip(
            (
                "policy_chosen_logps",
                "policy_rejected_logps",
                "reference_chosen_logps",
                "reference_rejected_logps",
            ),
            logps,
            strict=True,
        )
    )
    assert torch.equal(trainer.dpo_loss(**older)[0], losses)
    torch.testing.assert_close(chosen, 0.3 * (logps[0] - logps[2]).detach())
    torch.testing.assert_close(rejected, 0.3 * (logps[1] - logps[3]).detach())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(losses.mean().detach()), rel=1e-6)


def test_dpo_loss_without_reference_and_with_likelihood():
    trainer = make(beta=0.3)
    chosen, rejected, reference = (torch.tensor([value]) for value in (-3.0, -5.0, -4.0))
    losses, good, bad = trainer.dpo_loss(chosen, rejected, reference, reference)
    assert losses.item() == pytest.approx(torch.nn.functional.softplus(torch.tensor(-0.6)).item())
    assert (good.item(), bad.item()) == (pytest.approx(0.3), pytest.approx(-0.3))
    free = trainer.dpo_loss(chosen, rejected, reference + 7, reference, True)[0]
    assert free.item() == losses.item()
    likelihood = trainer.dpo_loss(chosen, rejected, reference, reference, "sft", {"nll_loss": torch.tensor(2.5)})
    assert likelihood[0].tolist() == [2.5]
    with pytest.raises(TypeError, match="'sft' needs model_output"):
        trainer.dpo_loss(chosen, rejected, reference, reference, "sft")
    with pytest.raises(TypeError, match="got 1 and \\['other'\\]"):
        trainer.dpo_loss(chosen, other=rejected)
    with pytest.raises(ValueError, match="loss_type"):
        trainer.dpo_loss(chosen, rejected, reference, reference, "kto_pair")


def test_get_batch_loss_metrics_are_those_of_a_step():
    trainer, own, _ = batches(rpo_alpha=0.4)
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model, own)
    assert trainer.get_batch_metrics(trainer.model, own, "eval")[1] == {
        f"eval_{name}": value for name, value in metrics.items()
    }
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, value in metrics.items():
        assert log[name] == pytest.approx(value, rel=1e-12), name
    assert "nll_loss" in metrics and len(metrics) == 9


def test_stored_metrics_are_logged():
    trainer = make()
    trainer.store_metrics({"mine": 2.0})
    trainer.store_metrics({"mine": 4.0})
    trainer.log({"loss": 1.0})
    assert trainer.state.log_history[-1]["mine"] == 3.0


def test_there_may_be_no_reference():
    trainer, own, _ = batches(reference_free=True, model=policy_and_reference()[0])
    with trainer.null_ref_context():
        pass
    with pytest.raises(ValueError, match="reference_free=True leaves no reference"):
        trainer.compute_ref_log_probs(own)
    with pytest.raises(ValueError, match="no reference to generate with"):
        trainer.get_batch_samples(trainer.model, own)


# ---- rows


def test_tokenize_row_and_build_tokenized_answer():
    found = DPOTrainer.tokenize_row(TEXTS[0], words(), 2, 2, add_special_tokens=False)
    assert found == {"prompt_input_ids": [6, 7], "chosen_input_ids": [8, 9], "rejected_input_ids": [10, 1]}
    trainer = make(processing_class=words())
    answer = trainer.build_tokenized_answer("w5 ", "w6 w7")
    assert (answer["prompt_input_ids"], answer["input_ids"]) == ([5], [6, 7])


def test_process_row_keeps_what_the_processor_makes_of_the_images():
    processor = tiny_processor("llava")
    row = {
        "images": [tiny_image(0)],
        "prompt": "<image>And then?",
        "chosen": " Next.",
        "rejected": " It is blue.",
    }
    found = DPOTrainer.process_row(row, processor, None, 2, add_special_tokens=False)
    made = processor(images=row["images"], text=row["prompt"], add_special_tokens=False)
    assert found["prompt_input_ids"] == list(made["input_ids"][0])
    assert torch.equal(torch.as_tensor(found["pixel_values"]), torch.as_tensor(made["pixel_values"][0]))
    assert len(found["chosen_input_ids"]) == len(found["rejected_input_ids"]) == 2


# ---- completions


def test_samples_of_policy_and_reference_in_the_older_meaning():
    trainer, own, padded = batches(max_length=14)
    state = torch.random.get_rng_state()
    policy, reference = trainer.get_batch_samples(trainer.model, padded)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(policy) == len(reference) == len(ROWS) and policy != reference
    for row, mine, other in zip(ROWS, policy, reference, strict=True):
        prompt = trainer.processing_class.decode(row["prompt_input_ids"])
        assert mine.startswith(prompt) and other.startswith(prompt)
        assert len(mine.split()) <= 14
    assert trainer.generate_from_model_and_ref(trainer.model, own) == (policy, reference)
    found, count = trainer.get_batch_samples(iter([own, own]), 2, torch.device("cpu"))  # transformers' hook
    assert len(found) == 2 and count.tolist()[0] == 2 * len(ROWS)


def table_of(trainer, monkeypatch):
    tables = []
    monkeypatch.setattr(
        "trl.trainer.samples.log_table",
        lambda name, table, report_to, **options: tables.append((name, table, options["step"])),
    )
    trainer.evaluate()
    return tables


def test_a_table_is_made_at_evaluation(monkeypatch, capsys):
    data = Dataset.from_list(ROWS)
    settings = {
        "eval_dataset": data,
        "generate_during_eval": True,
        "max_length": 20,
        "per_device_eval_batch_size": 3,
    }
    ((name, table, step),) = table_of(make(**settings), monkeypatch)
    assert (name, step) == ("game_log", 0)
    assert list(table.columns) == ["Prompt", "Policy", "Ref Model"] and len(table) == 3
    decode = make().processing_class.decode
    assert set(table["Prompt"]) <= {decode(row["prompt_input_ids"]) for row in ROWS}
    assert list(table["Policy"]) != list(table["Ref Model"])
    assert "Ref Model" in capsys.readouterr().out
    ((_, again, _),) = table_of(make(**settings), monkeypatch)
    assert again.equals(table)
    ((_, other, _),) = table_of(make(**{**settings, "seed": 12}), monkeypatch)
    assert not other.equals(table)


def test_sampling_leaves_training_alone():
    ends = []
    for sampling in (True, False):
        trainer = make(
            model=policy_and_reference(attn_pdrop=0.2, resid_pdrop=0.2)[0], eval_dataset=Dataset.from_list(ROWS),
            eval_strategy="steps", eval_steps=1, max_steps=3, generate_during_eval=sampling, max_length=16,
            disable_dropout=False, per_device_train_batch_size=2,
        )  # fmt: skip
        trainer.train()
        ends.append(trainer.keep.steps)
    for one, other in zip(*ends, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
