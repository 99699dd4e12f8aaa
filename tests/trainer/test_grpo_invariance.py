"""GRPO, its relatives and RLOO in float64: gradients do not depend on how a step is cut, laid out, scored or spread.

Four steps of each method, of which three are off-policy; gradients agree to 1e-10 of the largest, logs to 1e-9.
"""

import functools
import json

import pytest
import torch

from tests.trainer.group_methods import EVALUATED, METHODS, comparable, found_of
from tests.two_processes import launch
from trl.models.scoring import base as scorer_base
from trl.tensors import heads
from trl.trainer import online_trainer

SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
WITHIN_GROUPS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 8,
}
LAYOUTS = {
    "split": SPLIT,
    "split within groups": WITHIN_GROUPS,
    "no shared prompts": {"prefix_sharing": False},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def whole():
    return functools.cache(found_of)


@pytest.fixture
def pad_rows(monkeypatch):
    return lambda: monkeypatch.setattr(
        scorer_base, "flat_obstacle", lambda core: "this test wants padded rows"
    )


@pytest.fixture
def small_chunks(monkeypatch):
    return lambda: monkeypatch.setattr(heads, "default_chunk_size", lambda *args, **kwargs: 3)


@pytest.fixture
def score_first(monkeypatch):
    """Go back through the head after the objective, as where its gradient is not local to a token."""
    return lambda: monkeypatch.setattr(online_trainer, "is_overridden_with", lambda *names: False)


def assert_same(found, expected):
    assert len(found["gradients"]) == len(expected["gradients"]) == 4
    for own, other in zip(found["gradients"], expected["gradients"], strict=True):
        size = max(float(value.abs().max()) for value in other.values())
        assert size > 1e-4
        for name, value in other.items():
            assert (own[name] - value).abs().max() <= 1e-10 * size, name
    for own, other in zip(found["logs"], expected["logs"], strict=True):
        assert own.keys() == other.keys()
        for name in comparable(other):
            tolerance = 1e-6 if name == "loss" else 1e-9  # transformers sums it in float32
            assert own[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("method", METHODS)
def test_split_padded_and_chunked(method, whole, pad_rows, small_chunks):
    expected = whole(method)
    pad_rows()
    small_chunks()
    assert_same(found_of(method, **SPLIT), expected)


@pytest.mark.parametrize("method", METHODS)
def test_split_within_groups_without_shared_prompts_and_scored_first(method, whole, score_first):
    expected = whole(method)
    score_first()
    assert_same(found_of(method, **WITHIN_GROUPS, prefix_sharing=False), expected)


@pytest.mark.parametrize("layout", [*LAYOUTS, "padded", "small chunks", "scored first"])
def test_each_change_by_itself(layout, whole, pad_rows, small_chunks, score_first):
    method, expected = "dapo", whole("dapo")
    {"padded": pad_rows, "small chunks": small_chunks, "scored first": score_first}.get(layout, dict)()
    assert_same(found_of(method, **LAYOUTS.get(layout, {})), expected)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes(tmp_path, whole):
    settings = {"per_device_train_batch_size": 4}
    launch("tests.trainer.group_methods", str(tmp_path / "two.pt"), json.dumps(settings))
    two = torch.load(tmp_path / "two.pt")
    for method in METHODS:
        assert_same(two[method], whole(method))
    for method in EVALUATED:
        expected = found_of(method, evaluates=True, per_device_eval_batch_size=8)["eval"]
        names = [name for name in expected if not name.startswith("eval_clip_ratio")]
        assert {"eval_reward", "eval_loss", "eval_completions/max_length"} < set(names)
        assert ("eval_sampling/importance_sampling_ratio/min" in names) == (method == "corrected")
        for name in names:
            assert two[method]["eval"][name] == pytest.approx(expected[name], abs=1e-9), name
