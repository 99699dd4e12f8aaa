"""The router's loss of an optimiser step is counted over the step: the same however it is cut, to 1e-6 in float32."""

import json

import pytest
import torch

from tests.tiny import tiny_model
from tests.trainer.one_step import assert_same_gradient, run
from tests.two_processes import launch

ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def mixture(dtype=torch.float32, **overrides):
    return tiny_model("mixtral", dtype=dtype, **ROUTED, **overrides)


@pytest.fixture(scope="module")
def whole():
    return run(mixture())


@pytest.mark.parametrize(
    "cut",
    [
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, "padding_free": True},
    ],
    ids=str,
)
def test_cuts_of_a_step_have_one_loss_and_gradient(cut, whole):
    trainer, keep = run(mixture(), **cut)
    expected, log = whole[0].state.log_history[0], trainer.state.log_history[0]
    for name in ("loss", "aux_loss"):
        assert log[name] == pytest.approx(expected[name], abs=1e-6), name
    assert_same_gradient(keep.steps[0], whole[1].steps[0], tolerance=1e-5)


def test_the_gradient_is_that_of_a_plain_loop(whole):
    """The mean of -log p over trained tokens, and half the loss of transformers' own function over the whole batch."""
    trainer, keep = whole
    model = mixture()
    batch = trainer.scorer.padded_inputs(trainer.data_collator([trainer.train_dataset[n] for n in range(8)]))
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    (torch.nn.functional.cross_entropy(logits, targets) + 0.5 * outputs.aux_loss).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradient(keep.steps[0], expected, tolerance=1e-5)


@pytest.mark.parametrize("size", [4, 2, 3])
def test_two_processes_have_the_loss_of_one(size, whole, tmp_path):
    """Also where the last batches are not full: five batches of at most 3 rows for 8 rows, one of them filling up."""
    mixture().save_pretrained(tmp_path / "model")
    steps = {"gradient_accumulation_steps": {4: 1, 2: 2, 3: 2}[size], "per_device_train_batch_size": size}
    settings = {"model": str(tmp_path / "model"), "num_train_epochs": 1, "max_steps": -1, **steps}
    launch("tests.trainer.one_step", str(tmp_path / "out.pt"), json.dumps(settings))
    log, expected = torch.load(tmp_path / "out.pt")[0], whole[0].state.log_history[0]
    for name in ("loss", "aux_loss"):
        assert log[name] == pytest.approx(expected[name], abs=2e-6), name
