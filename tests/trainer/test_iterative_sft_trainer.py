"""`IterativeSFTTrainer.step` trains as `SFTTrainer` does on the same rows, however they are cut, and says what it cannot."""

import numpy as np
import pytest
import torch
from datasets import Dataset

from tests.tiny import tiny_model, tiny_seq2seq
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.iterative_runs import inputs, make
from tests.trainer.one_step import fixed_rows, run
from tests.trainer.sft_runs import QUICK, model_for
from tests.two_processes import ending, launch
from trl import IterativeSFTConfig, IterativeSFTTrainer, SFTConfig, SFTTrainer
from trl.checkpoints.ownership import PREFIX
from trl.data.step_inputs import StepRows


@pytest.fixture(scope="module")
def reference():
    """Gradients and log of one optimiser step of `SFTTrainer` on the eight rows."""
    trainer, keep = run()
    return keep.steps[0], trainer.state.log_history[0]


def assert_same(found, expected, tolerance=1e-12):
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance)


CUTS = {
    "one batch": {},
    "two of four": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "three, the last one smaller": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "eight of one": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "padding-free": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "padding_free": True,
    },
    "more than there is": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_step_is_that_of_sft_however_it_is_cut(reference, cut):
    trainer, keep = make(**CUTS[cut])
    trainer.step(**inputs())
    assert trainer.state.global_step == 1
    assert_same(keep.steps[0], reference[0])
    logged = trainer.state.log_history[0]
    for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        assert logged[name] == pytest.approx(reference[1][name], rel=1e-6), name  # transformers logs float32


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_hidden_by_the_attention_mask(reference, side):
    trainer, keep = make()
    given = inputs()
    width = max(len(row) for row in given["input_ids"])

    def padded(rows, value):
        gaps = [(width - len(row), 0) if side == "left" else (0, width - len(row)) for row in rows]
        return [torch.nn.functional.pad(row, gap, value=value) for row, gap in zip(rows, gaps, strict=True)]

    masks = padded([torch.ones_like(row) for row in given["input_ids"]], 0)
    trainer.step(torch.stack(padded(given["input_ids"], 7)), masks, padded(given["labels"], 9))
    assert_same(keep.steps[0], reference[0])


def test_steps_go_on_with_the_optimiser_and_the_schedule_of_one_run():
    """Two calls of four rows, and one call of eight: both are the two optimiser steps of one run of SFT."""
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
    }
    sft, _ = run(model=tiny_model("gpt2", dtype=torch.float64), train_sampling_strategy="sequential", **settings)
    whole, _ = make(**settings)
    whole.step(**inputs())
    halves, _ = make(**settings)
    halves.step(**inputs(fixed_rows()[:4]))
    halves.step(**inputs(fixed_rows()[4:]))
    for trainer in (whole, halves):
        assert trainer.state.global_step == 2
        assert_same(dict(trainer.model.named_parameters()), dict(sft.model.named_parameters()), 1e-12)
        rates = [entry["learning_rate"] for entry in trainer.state.log_history]
        assert rates == [0.1, 0.05]


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_share_a_step(reference, tmp_path):
    out = tmp_path / "found.pt"
    launch("tests.trainer.iterative_runs", str(out), '{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 9}')  # fmt: skip
    found = torch.load(out)
    assert_same(found["gradients"][0], reference[0])
    assert found["logs"][0]["loss"] == pytest.approx(reference[1]["loss"], rel=1e-6)
    assert found["refusal"].startswith("the processes have [1, 2] batches in this call, expected as many each.")


# ---- texts


def texts_trainer(**settings):
    tokenizer = tiny_tokenizer()
    args = {**QUICK, "max_steps": 1, "max_grad_norm": 0.0, "optim": "sgd"} | settings
    return IterativeSFTTrainer(model_for(tokenizer), IterativeSFTConfig(**args), processing_class=tokenizer)


def test_texts_train_what_sft_trains_of_a_text_column(tmp_path):
    texts = ["The sky is blue.", "Seven apples are left.<|im_end|>", "A: 12 pears", "Look up."]
    trainer = texts_trainer(output_dir=tmp_path)
    trainer.step(texts=texts)
    tokenizer = tiny_tokenizer()
    args = SFTConfig(tmp_path / "sft", **{**QUICK, "max_steps": 1, "max_grad_norm": 0.0, "optim": "sgd"})
    rows = Dataset.from_dict({"text": texts})
    sft = SFTTrainer(model_for(tokenizer), args, train_dataset=rows, processing_class=tokenizer)
    sft.train()
    assert_same(dict(trainer.model.named_parameters()), dict(sft.model.named_parameters()), 1e-6)
    assert trainer.state.log_history[0]["num_tokens"] == sft.state.log_history[0]["num_tokens"]


def rows_of(max_length=None, keep_end=True, encoder_decoder=False, **given):
    read = StepRows(tiny_tokenizer(), encoder_decoder, max_length, keep_end)
    names = ("input_ids", "attention_mask", "labels", "texts", "texts_labels")
    rows = read(**{name: given.get(name) for name in names})
    return [(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows]


def test_rows_of_arrays_and_masks_of_truth_values():
    ids, mask = [[5, 6, 7], [8, 9, 4]], [[True, True, False], [True, True, True]]
    expected = rows_of(input_ids=ids, attention_mask=[[1, 1, 0], [1, 1, 1]])
    of_arrays = rows_of(input_ids=[np.array(row, dtype=np.uint16) for row in ids], attention_mask=mask)
    of_tensors = rows_of(input_ids=ids, attention_mask=torch.tensor(mask))
    assert of_arrays == of_tensors == expected


def test_labels_of_texts():
    tokenizer = tiny_tokenizer()
    sky = [*tokenizer("The sky")["input_ids"], tokenizer.eos_token_id]
    assert rows_of(texts=["The sky"]) == [(sky, sky)]
    assert rows_of(texts=Dataset.from_dict({"text": ["The sky"]})["text"]) == [(sky, sky)]
    assert rows_of(texts=["The sky"], texts_labels=["The sky<|im_end|>"]) == [(sky, sky)]
    blue = [*tokenizer("It is blue.")["input_ids"], tokenizer.eos_token_id]
    assert rows_of(None, True, True, texts=["The sky"], texts_labels=["It is blue."]) == [(sky, blue)]


# ---- encoder-decoders


@pytest.mark.parametrize("cut", [(4, 1), (1, 4), (3, 2)])
def test_an_encoder_decoder_learns_its_labels(cut):
    """The gradient of the mean over all label tokens, as the model's own loss on each row alone gives it."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, 60, (n,), generator=generator) for n in (4, 7, 3, 6)]
    labels = [torch.randint(3, 60, (n,), generator=generator) for n in (5, 2, 3, 1)]
    model, other = (tiny_seq2seq("t5", dtype=torch.float64) for _ in range(2))
    for row, target in zip(ids, labels, strict=True):
        loss = other(input_ids=row[None], labels=target[None]).loss
        (loss * len(target) / sum(map(len, labels))).backward()
    expected = {name: p.grad for name, p in other.named_parameters() if p.grad is not None}
    trainer, keep = make(model, per_device_train_batch_size=cut[0], gradient_accumulation_steps=cut[1])
    fill = [torch.nn.functional.pad(target, (0, 5 - len(target)), value=-100) for target in labels]
    trainer.step(ids, labels=fill)
    assert_same(keep.steps[0], expected, 1e-9)
    with pytest.raises(ValueError, match="step of an encoder-decoder needs labels"):
        trainer.step(ids)


# ---- a run


def test_without_max_steps_the_schedule_stays_and_the_run_has_no_end():
    trainer, _ = make(max_steps=-1, lr_scheduler_type="linear", warmup_steps=2, per_device_train_batch_size=4)
    for _ in range(3):
        trainer.step(**inputs())
    rates = [entry["learning_rate"] for entry in trainer.state.log_history]
    assert trainer.state.global_step == 6
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.1, 0.1, 0.1])


def test_steps_beyond_max_steps_are_refused_before_anything_is_trained():
    trainer, _ = make(max_steps=1, per_device_train_batch_size=4)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(ValueError, match="this call makes 2 optimiser steps after 0, expected at most max_steps=1"):
        trainer.step(**inputs())
    assert_same(dict(trainer.model.named_parameters()), before, 0)
    trainer.step(**inputs(fixed_rows()[:4]))
    with pytest.raises(ValueError, match="makes 1 optimiser steps after 1"):
        trainer.step(**inputs(fixed_rows()[:4]))


def test_a_run_is_resumed_to_the_same_bits(tmp_path):
    settings = {
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "max_steps": 6,
        "per_device_train_batch_size": 4,
    }

    def model():
        return tiny_model("llama", attention_dropout=0.2)

    whole, _ = make(model(), tmp_path / "whole", **settings)
    for _ in range(3):
        whole.step(**inputs())
    first, _ = make(model(), tmp_path / "parts", save_strategy="steps", save_steps=2, **settings)
    first.step(**inputs())
    second, _ = make(model(), tmp_path / "parts", **settings)
    second.resume()
    assert second.state.global_step == 2
    for _ in range(2):
        second.step(**inputs())
    assert_same(dict(second.model.named_parameters()), dict(whole.model.named_parameters()), 0)
    strip = [{k: v for k, v in entry.items() if k != "epoch"} for entry in second.state.log_history]
    assert strip == [{k: v for k, v in entry.items() if k != "epoch"} for entry in whole.state.log_history]
    assert second.state.epoch == whole.state.epoch
    with pytest.raises(ValueError, match="resume was called after a step"):
        second.resume()
    with pytest.raises(FileNotFoundError):
        make(model(), tmp_path / "nothing")[0].resume()


# ---- what cannot be used

BAD = {
    "nothing": ({}, ValueError, "step takes input_ids or texts, got neither"),
    "both": ({"input_ids": [[1, 2]], "texts": ["a"]}, ValueError, "got both"),
    "labels with texts": ({"texts": ["a"], "labels": [[1]]}, ValueError, "labels cannot be given with texts"),
    "texts_labels with ids": ({"input_ids": [[1, 2]], "texts_labels": ["a"]}, ValueError, "cannot be given with input_ids"),
    "no rows": ({"input_ids": []}, TypeError, "list of at least 1 tensor, got"),
    "no texts": ({"texts": []}, TypeError, "list of at least 1 text, got"),
    "one text": ({"texts": "a"}, TypeError, "must be a list of at least 1 text, got"),
    "a number": ({"input_ids": 3}, TypeError, "list of at least 1 tensor, got int"),
    "texts as ids": ({"input_ids": ["a"]}, TypeError, r"input_ids\[0\] must be a tensor of token ids, got str"),
    "ids as texts": ({"texts": ["a", [1]]}, TypeError, r"texts\[1\] must be a text"),
    "empty text": ({"texts": ["a b", ""]}, TypeError, r"texts\[1\] must be a text"),
    "empty row": ({"input_ids": [[1, 2], []]}, ValueError, r"input_ids\[1\] is empty"),
    "batches": ({"input_ids": [[[1, 2], [3, 4]]]}, ValueError, r"input_ids\[0\] must have one dimension"),
    "floats": ({"input_ids": [torch.ones(3)]}, TypeError, r"input_ids\[0\] must hold token ids"),
    "too few labels": ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2]]}, ValueError, "labels has 1 rows, expected 2"),
    "short labels": ({"input_ids": [[1, 2]], "labels": [[1]]}, ValueError, r"labels\[0\] must have 2 values, got 1"),
    "too few masks": ({"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1]]}, ValueError, "attention_mask has 1 rows"),
    "short mask": ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, ValueError, r"attention_mask\[0\] must have 2 values, got 1"),
    "too few texts_labels": ({"texts": ["a b", "c"], "texts_labels": ["a b"]}, ValueError, "texts_labels has 1 rows"),
    "other texts_labels": ({"texts": ["a"], "texts_labels": ["It is blue."]}, ValueError, r"texts_labels\[0\] must have"),
    "nothing trained": ({"input_ids": [[1, 2]], "labels": [[1, -100]]}, ValueError, "row 0 has no trained token"),
    "cut away": (
        {"input_ids": [[1, 2, 3, 4, 5, 6]], "labels": [[1, 2, 3, -100, -100, -100]]},
        ValueError,
        "no trained token after it was cut from 6 to 4",
    ),
    "unknown token": ({"input_ids": [[1, 70_000]]}, ValueError, "row 0 has the tokens 1 to 70000, expected 0 to"),
}  # fmt: skip


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return texts_trainer(output_dir=tmp_path_factory.mktemp("short"), max_length=4)


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_on_is_named(short, case):
    given, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        short.step(**given)
    assert short.state.global_step == 0


def test_rows_beyond_the_models_positions_are_refused():
    trainer, _ = make()
    with pytest.raises(ValueError, match=r"1 of 2 sequences are longer than the 256 positions .* has 257 tokens"):
        trainer.step(input_ids=[torch.ones(256, dtype=torch.int64), torch.ones(257, dtype=torch.int64)])
    assert trainer.state.global_step == 0


def test_settings_that_cannot_work(short, tmp_path):
    with pytest.raises(TypeError, match="Give rows to step"):
        short.train()
    with pytest.raises(ValueError, match="label_smoothing_factor must be 0 for an encoder-decoder"):
        make(tiny_seq2seq("t5"), label_smoothing_factor=0.1)


def test_a_loop_owns_its_folder_while_its_trainer_lives(tmp_path):
    """Trainers of one process may take turns in a folder; those of another process are refused."""
    settings = {"folder": tmp_path, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    trainer, _ = make(**settings)
    trainer.step(**inputs())
    (held,) = tmp_path.glob(f"{PREFIX}*")
    resumed, _ = make(**settings)
    resumed.resume()
    resumed.step(**inputs())
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2
    clear = f"from pathlib import Path; from trl.checkpoints.ownership import clear; clear(Path({str(tmp_path)!r}))"
    status, written = ending("tests.run_code", clear)
    assert status == 1 and "Another run is active" in written
    resumed._ends()
    trainer._ends()
    assert not held.exists() and not list(tmp_path.glob(f"{PREFIX}*"))
