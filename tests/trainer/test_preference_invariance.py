"""One optimiser step of each method of preferences has one gradient, however its rows are cut, laid out or spread.

float64 throughout; gradients agree to 1e-10 of the largest gradient, metrics to 1e-12.
"""

import functools
import json
from typing import Any

import pytest
import torch

from tests.trainer.preference_methods import METHODS
from tests.trainer.preference_worker import uneven_evaluation
from tests.two_processes import launch
from trl.models.scoring import base as scorer_base

SPLITS = {
    "2x4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "4x2": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "8x1": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"prefix_sharing": False},
    "plain 4x2": {"prefix_sharing": False, **SPLITS["4x2"]},
    "checkpointed": {"gradient_checkpointing": True},
}
LOGGED = ("epoch", "step", "grad_norm", "learning_rate")


def step(method: str, **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient and the log of one step."""
    make, own = METHODS[method]
    trainer = make(**{**own, **settings})
    trainer.train()
    (gradients,) = trainer.keep.steps
    return gradients, trainer.state.log_history[0]


@pytest.fixture(scope="module")
def whole():
    return functools.cache(step)


def assert_same(found, expected, *, also_metrics: bool = True):
    gradients, log = found
    size = max(gradient.abs().max() for gradient in expected[0].values())
    assert gradients.keys() == expected[0].keys()
    assert size > 1e-6
    for name, gradient in expected[0].items():
        assert (gradients[name] - gradient).abs().max() <= 1e-10 * size, name
    if also_metrics:
        # transformers adds the micro-batches' losses up in float32
        assert log["loss"] == pytest.approx(expected[1]["loss"], rel=1e-6)
        for name in set(expected[1]) - {"loss", *LOGGED}:
            assert log[name] == pytest.approx(expected[1][name], rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("method", METHODS)
def test_accumulation_splits(method, split, whole):
    assert_same(step(method, **SPLITS[split]), whole(method))


@pytest.mark.parametrize(
    ("method", "layout"),
    # A row of PRM is one sequence: it has no prompt that others could share.
    [(m, name) for m in METHODS for name in LAYOUTS if m != "prm" or "prefix_sharing" not in LAYOUTS[name]],
)
def test_layouts(method, layout, whole):
    assert_same(step(method, **LAYOUTS[layout]), whole(method))


REFERRED = [m for m in METHODS if m.startswith(("dpo", "kto", "bco")) and m != "dpo-reference-free"]


@pytest.mark.parametrize("split", ["whole", "4x2"])
@pytest.mark.parametrize("method", REFERRED)
def test_a_reference_asked_in_advance(method, split, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    found = step(method, precompute_ref_log_probs=True, **SPLITS.get(split, {}))
    assert_same(found, whole(method))


@pytest.mark.parametrize("method", METHODS)
def test_padded_rows(method, whole, monkeypatch):
    monkeypatch.setattr(scorer_base, "flat_obstacle", lambda core: "this test wants padded rows")
    assert_same(step(method, **SPLITS["2x4"]), whole(method))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes(tmp_path, whole):
    """Two processes of half the rows each; evaluation of seven rows counts none twice."""
    out = tmp_path / "two.pt"
    settings = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    launch("tests.trainer.preference_worker", str(out), json.dumps(settings))
    two = torch.load(out, weights_only=False)
    for method in METHODS:
        assert_same((two[method]["gradients"][0], two[method]["log"]), whole(method))
        make, own = METHODS[method]
        trainer = make(**{**own, "per_device_eval_batch_size": 8})
        trainer.train()
        expected = uneven_evaluation(trainer)
        if method in ("dpo-aot", "dpo-aot_pair"):  # an evaluation sorts within each batch
            expected["eval_loss"] = two[method]["eval"]["eval_loss"]
        assert two[method]["eval"] == pytest.approx(expected, rel=1e-9, abs=1e-9), method
