"""GRPO and RLOO in float64: gradients do not depend on how a step is cut, laid out or shared by processes."""

import json

import pytest
import torch

from tests.trainer.grpo_runs import logs, prompts, run
from tests.trainer.one_step import launch
from trl.objectives.group_policy import LOSS_TYPES

SHAPES = {
    "split": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "split within groups": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    "no shared prompts": {"prefix_sharing": False},
}
WHOLE = {"per_device_train_batch_size": 16, "num_iterations": 2, "max_steps": 3}


def settings_of(loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    extra = {"epsilon_high": 1.2} if loss_type == "cispo" else {}
    return {**WHOLE, "loss_type": loss_type, "importance_sampling_level": level, **extra}


def assert_same_gradients(found, expected, tolerance=1e-10):
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        scale = max(float(value.abs().max()) for value in other.values())
        assert scale > 0
        for name, value in other.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=tolerance * max(scale, 1), msg=name)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_splits_and_layouts(loss_type):
    _, expected = run(**settings_of(loss_type))
    for name, change in SHAPES.items():
        _, found = run(**{**settings_of(loss_type), **change})
        assert_same_gradients(found.steps, expected.steps), name


def test_splits_of_rloo():
    settings = {**WHOLE, "normalize_advantages": True}
    trainer, expected = run("rloo", **settings)
    for change in SHAPES.values():
        other, found = run("rloo", **{**settings, **change})
        assert_same_gradients(found.steps, expected.steps)
        for own, known in zip(logs(other), logs(trainer), strict=True):
            for name in ("reward", "kl", "num_tokens", "completions/mean_length"):
                if name in known:
                    assert own[name] == pytest.approx(known[name], abs=1e-9), name


def test_chosen_tokens_do_not_depend_on_the_split():
    settings = {**WHOLE, "top_entropy_quantile": 0.4, "importance_sampling_level": "sequence"}
    _, expected = run(**settings)
    _, found = run(**{**settings, **SHAPES["split within groups"]})
    assert_same_gradients(found.steps, expected.steps)


def test_later_steps_of_a_window_do_not_depend_on_the_split():
    settings = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 4}
    _, expected = run(**settings)
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    _, found = run(**{**settings, **split})
    assert_same_gradients(found.steps, expected.steps)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_two_processes(method, tmp_path):
    rate = (
        0.05 if method == "grpo" else 0.001
    )  # RLOO's ratio is that of whole completions: soon all of them are clipped
    settings = {"num_iterations": 2, "per_device_train_batch_size": 8, "max_steps": 4, "learning_rate": rate}
    trainer, expected = run(method, **settings)
    metrics = trainer.evaluate(prompts(4))
    cut = {**settings, "per_device_train_batch_size": 4, "method": method}
    launch("tests.trainer.grpo_runs", str(tmp_path / "two.pt"), json.dumps(cut))
    found = torch.load(tmp_path / "two.pt")
    assert_same_gradients(found["gradients"], expected.steps)
    for own, known in zip(found["logs"], logs(trainer), strict=True):
        assert own.keys() == known.keys()
        for name, value in known.items():
            if not name.startswith("clip_ratio") or name.endswith("mean"):
                single = name == "loss"  # transformers sums it over processes in float32
                assert own[name] == pytest.approx(value, abs=1e-6 if single else 1e-9), name
    for name in ("eval_reward", "eval_completions/mean_length", "eval_completions/clipped_ratio"):
        assert found["eval"][name] == pytest.approx(metrics[name], abs=1e-9), name
