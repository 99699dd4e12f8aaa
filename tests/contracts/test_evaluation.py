"""Evaluations and predictions between steps leave the weights that training ends in as they are, to the bit."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.contracts.methods import ROWS

KEEPS = {"sft": {"neftune_noise_alpha": 3.0}, "gkd": {}, "gkd-on-policy": {}, "prm": {}}
STEPS = {"max_steps": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}


class Predicts(TrainerCallback):
    """Evaluates by `predict` and draws numbers of its own, within the evaluation after each step."""

    trainer: Any = None

    def on_evaluate(self, args, state, control, **kwargs):
        random.random(), np.random.rand(), torch.rand(())
        self.trainer.predict(self.trainer.eval_dataset)


def dropping(trainer: Any) -> Any:
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    dropping(trainer).train()
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


@pytest.mark.parametrize("method", ["sft", "gkd-on-policy", "dpo-sigmoid", "kto", "bco", "cpo-simpo", "reward", "prm"])
def test_rows(method):
    make, own = ROWS[method]
    settings = {**own, **STEPS, **KEEPS.get(method, {"disable_dropout": False})}
    plain = make(**settings)
    predicts = Predicts()
    other = make(
        **settings,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        eval_dataset=plain.train_dataset,
        callbacks=[predicts],
    )
    predicts.trainer = other
    expected = weights(plain)
    for name, value in weights(other).items():
        assert torch.equal(value, expected[name]), name
    without = make(**settings)
    without.train()  # dropout has an effect
    assert any(not torch.equal(value, expected[name]) for name, value in without.model.named_parameters())
