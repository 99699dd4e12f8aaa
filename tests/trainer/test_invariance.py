"""One optimiser step has one gradient, however its rows are cut, padded, packed, chunked or spread over processes.

float64 throughout; gradients agree to 1e-10 of the largest gradient, losses and metrics to 1e-12.
"""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer.one_step import fixed_rows, run
from tests.two_processes import launch
from trl.models.scoring import base as scorer_base
from trl.models.scoring import causal as forward

ROOT = Path(__file__).resolve().parents[2]
METRICS = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm")
SPLITS = {
    "1x8": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "2x4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "4x2": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "8x1": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
}
LAYOUTS = {
    "padded": {},
    "padding-free": {"padding_free": True},
    "packed": {"packing": True, "max_length": 24, "per_device_train_batch_size": 8},
    "multiple": {"pad_to_multiple_of": 16},
    "flat multiple": {"padding_free": True, "pad_to_multiple_of": 32},
}


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    size = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-10 * size, name


@pytest.fixture(scope="module")
def whole():
    return {loss: run(loss_type=loss)[1].steps[0] for loss in ("nll", "dft")}


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("split", SPLITS)
def test_accumulation_splits(split, loss_type, whole):
    _, keep = run(loss_type=loss_type, **SPLITS[split])
    assert len(keep.steps) == 1
    assert_same_gradients(keep.steps[0], whole[loss_type])


@pytest.mark.parametrize("split", ["1x8", "4x2"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "packed"])
def test_layouts(layout, split, whole):
    _, keep = run(**{**SPLITS[split], **LAYOUTS[layout]})
    assert_same_gradients(keep.steps[0], whole["nll"])


@pytest.mark.parametrize("batch", [8, 1])
def test_packing(batch, whole):
    packed = {**LAYOUTS["packed"], "per_device_train_batch_size": batch}
    rows = len(run(**packed, max_steps=1)[0].train_dataset) if batch == 1 else 1
    _, keep = run(**packed, gradient_accumulation_steps=rows)
    assert_same_gradients(keep.steps[0], whole["nll"])


def test_rows_that_a_model_pads_itself(whole, monkeypatch):
    """The fallback of models that take no flat rows: padded rows, also for packed ones."""
    monkeypatch.setattr(scorer_base, "packed_unsupported", lambda model: "of this test")
    for layout in LAYOUTS.values():
        trainer, keep = run(**layout)
        assert not trainer.scorer.packed
        assert_same_gradients(keep.steps[0], whole["nll"])


def test_models_scored_from_their_own_logits(whole, monkeypatch):
    monkeypatch.setattr(forward, "head_unsupported", lambda core, rule: "of this test")
    trainer, keep = run(**SPLITS["4x2"])
    assert not trainer.scorer.uses_head
    assert_same_gradients(keep.steps[0], whole["nll"])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_chunk_sizes(size, whole, monkeypatch):
    monkeypatch.setattr("trl.tensors.heads.default_chunk_size", lambda *args, **kwargs: size)
    assert_same_gradients(run()[1].steps[0], whole["nll"])


def test_gradient_checkpointing_and_offloading(whole):
    for settings in ({"gradient_checkpointing": True}, {"activation_offloading": True}):
        assert_same_gradients(run(**settings)[1].steps[0], whole["nll"])


def test_a_plain_loop_gives_this_gradient(whole):
    """Nothing of ours: the mean of -log p over all trained tokens, row by row."""
    model = tiny_model("gpt2", dtype=torch.float64)
    losses = []
    for row in fixed_rows():
        ids, mask = torch.tensor([row["input_ids"]]), torch.tensor(row["completion_mask"][1:]).bool()
        logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        losses.append(-logps[mask])
    torch.cat(losses).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(whole["nll"], expected)


def test_metrics_do_not_depend_on_how_a_step_is_cut():
    logs = [run(**{**split, **layout})[0].state.log_history[0] for split in SPLITS.values() for layout in ({}, LAYOUTS["padding-free"], LAYOUTS["flat multiple"])]  # fmt: skip
    for name in METRICS:
        values = [log[name] for log in logs]
        assert values == pytest.approx([values[0]] * len(values), rel=1e-6 if name in ("loss", "grad_norm") else 1e-12), name  # fmt: skip


def test_evaluation_does_not_depend_on_the_batch_size():
    results = []
    for batch in (1, 3, 8):
        trainer, _ = run(max_steps=1, eval_packing=False, per_device_eval_batch_size=batch)
        results.append(trainer.evaluate(Dataset.from_list(fixed_rows())))
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        values = [result[name] for result in results]
        assert values == pytest.approx([values[0]] * 3, rel=1e-12), name


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("settings", [SPLITS["2x4"] | {"gradient_accumulation_steps": 1, "per_device_eval_batch_size": 2}, SPLITS["8x1"] | {"gradient_accumulation_steps": 4, "padding_free": True, "per_device_eval_batch_size": 3}], ids=["2x4", "2x1x4"])  # fmt: skip
def test_two_processes(settings, whole, tmp_path):
    out = tmp_path / "out.pt"
    launch("tests.trainer.one_step", str(out), json.dumps(settings))
    found = torch.load(out, weights_only=False)
    assert_same_gradients(found["gradients"][0], whole["nll"])
    trainer, _ = run(packing=False)
    for name in METRICS:
        assert found["logs"][0][name] == pytest.approx(trainer.state.log_history[0][name], rel=1e-6), name
    expected = trainer.evaluate(Dataset.from_list(fixed_rows()[:7]))
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        for log in found["logs"][-2:]:  # the second had the logits as well, for compute_metrics
            assert log[name] == pytest.approx(expected[name], rel=1e-9), name
    assert found["logs"][-1]["eval_rows"] == 7
