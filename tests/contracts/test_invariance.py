"""Each method's optimiser steps have one gradient and one log, however their rows are cut, laid out, scored or spread.

float64 throughout. Gradients agree to 1e-10 of the step's largest, metrics of rows to 1e-12, of rollouts to 1e-9.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contracts.methods import EVERY, FAMILIES, ROWS, Found, metrics_of, trained
from tests.trainer.group_methods import EVALUATED
from tests.two_processes import launch
from trl.methods.method import Scoring
from trl.models.scoring import base, causal
from trl.models.scoring.head import ScoreOptions
from trl.tensors import heads
from trl.trainer import online_trainer


class SmallChunks:
    """Rows of a chunk, the fewest and the most, and how often they were read."""

    reads = 0

    def __getitem__(self, place: int) -> int:
        self.reads += 1
        return (3, 3)[place]


def scored_first(self, batch, wants=None, logps=Scoring.logps):
    return logps(self, batch, replace(wants or ScoreOptions(), loss_of=None))


SMALL_CHUNKS = SmallChunks()
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "padded": (base, "packed_unsupported", lambda core: "this test wants padded rows"),
    "own logits": (causal, "head_unsupported", lambda core, rule: "this test wants the model's logits"),
    "small chunks": (heads, "CPU_CHUNK_ROWS", SMALL_CHUNKS),
    "scored by the trainer": (online_trainer.OnlineTrainer, "sampler_is_exact", property(lambda self: False)),
    # Back through the head after the objective, as where its gradient is not local to a token.
    "scored first": (Scoring, "logps", scored_first),
}


def batches(size: int, count: int, **settings: Any) -> dict[str, Any]:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": count, **settings}


REPEATED = {"prefix_sharing": False}
CHECKPOINTED = {"gradient_checkpointing": True}
IN_ADVANCE = {"precompute_ref_log_probs": True}
OF_GROUPS = {"split": batches(4, 2, steps_per_generation=4), "within": batches(2, 4, steps_per_generation=8)}
# Cuts of all methods of a family: names of patches, and settings.
CUTS: dict[str, dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "rows": {
        "2x4 padded": (("padded",), batches(4, 2)),
        "4x2 checkpointed, in small chunks, reference in advance": (
            ("small chunks",),
            batches(2, 4, **CHECKPOINTED, **IN_ADVANCE),
        ),
        "8x1 prompts repeated": ((), batches(1, 8, **REPEATED)),
    },
    "groups": {
        "split, padded, in small chunks": (("padded", "small chunks"), OF_GROUPS["split"]),
        "split within groups, prompts repeated, scored first": (
            ("scored first",),
            {**OF_GROUPS["within"], **REPEATED},
        ),
    },
    "ppo": {
        "2x4 padded": (("padded",), batches(4, 2)),
        "8x1 prompts repeated": ((), batches(1, 8, **REPEATED)),
        "scored one by one": (("scored first",), {"local_rollout_forward_batch_size": 1}),
    },
}
# Each change by itself, for one method of each family.
ALONE = {
    ("rows", "sft"): {"padded": {}, "own logits": {}, "small chunks": {}, "2x4": batches(4, 2), "8x1": batches(1, 8)},
    ("rows", "dpo-sigmoid"): {
        "padded": {}, "own logits": {}, "repeated": REPEATED, "in advance": IN_ADVANCE, "8x1": batches(1, 8),
    },
    ("rows", "kto"): {"padded": {}, "repeated": REPEATED, "8x1": batches(1, 8)},
    ("groups", "dapo"): {
        **OF_GROUPS, "padded": {}, "small chunks": {}, "scored first": {}, "repeated": REPEATED, "checkpointed": CHECKPOINTED,
    },
    ("ppo", "ppo"): {"padded": {}, "own logits": {}, "scored by the trainer": {}, "scored first": {}, "repeated": REPEATED, "checkpointed": CHECKPOINTED},
}  # fmt: skip


WITHOUT_CHUNKS = ("reward", "reward-centered", "prm")  # which score rows or steps


def applies(family: str, method: str, settings: dict[str, Any]) -> bool:
    """Whether a method has these settings: a row of SFT or PRM has no prompt that others share."""
    shares = family != "rows" or not method.startswith(("sft", "gkd", "gold", "prm"))
    return shares or REPEATED.keys().isdisjoint(settings)


def known_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a cut, without those of a reference where the method has none."""
    refers = method.startswith(("dpo", "kto", "bco")) and method != "dpo-reference-free"
    return {name: value for name, value in settings.items() if refers or name not in IN_ADVANCE}


def is_evaluated(family: str, method: str) -> bool:
    return family != "groups" or method in EVALUATED


@pytest.fixture(scope="session")
def whole():
    return functools.cache(lambda family, method: FAMILIES[family].run(method, evaluates=is_evaluated(family, method)))


def assert_same(found: Found, expected: Found, tolerance: float) -> None:
    assert len(found.gradients) == len(expected.gradients) > 0
    for own, other in zip(found.gradients, expected.gradients, strict=True):
        size = max(gradient.abs().max().item() for gradient in other.values())
        assert size > 1e-6 and own.keys() == other.keys()
        for name, gradient in other.items():
            assert (own[name] - gradient).abs().max().item() <= 1e-10 * size, name
    for own, other in zip(found.logs, expected.logs, strict=True):
        assert own.keys() == other.keys()
        for name, value in other.items():
            bound = 1e-6 if name == "loss" else tolerance  # transformers sums the loss in float32
            assert own[name] == pytest.approx(value, rel=bound, abs=bound), name


@pytest.mark.parametrize(
    ("family", "method", "cut"),
    [(f, m, cut) for f, m in EVERY for cut, (_, given) in CUTS[f].items() if applies(f, m, given)],
)
def test_cuts(family, method, cut, whole, tmp_path, monkeypatch):
    patches, settings = CUTS[family][cut]
    expected = whole(family, method)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))  # precomputed references
    for name in patches:
        monkeypatch.setattr(*PATCHES[name])
    reads = SMALL_CHUNKS.reads
    found = FAMILIES[family].run(method, **known_settings(method, settings))
    assert_same(found, expected, FAMILIES[family].tolerance)
    has_chunks = "small chunks" in patches and method not in WITHOUT_CHUNKS
    assert (SMALL_CHUNKS.reads > reads) == has_chunks


@pytest.mark.parametrize(
    ("family", "method", "change"), [(*key, change) for key, changes in ALONE.items() for change in changes]
)
def test_each_change_by_itself(family, method, change, whole, tmp_path, monkeypatch):
    expected = whole(family, method)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))  # precomputed references
    if change in PATCHES:
        monkeypatch.setattr(*PATCHES[change])
    found = FAMILIES[family].run(method, **ALONE[family, method][change])
    assert_same(found, expected, FAMILIES[family].tolerance)


@pytest.mark.parametrize("method", ROWS)
def test_evaluation_batch_sizes(method):
    """Metrics of seven rows do not depend on the batch size, but where a loss compares the rows of a batch."""
    trainer, found = trained(method), []
    for trainer.args.per_device_eval_batch_size in (2, 7):
        found.append(metrics_of(trainer, trainer.train_dataset.select(range(7))))
    one, seven = found
    within_a_batch = {
        "kto": ("eval_loss", "eval_kl"),
        "dpo-aot": ("eval_loss",),
        "dpo-aot_pair": ("eval_loss",),
    }
    for name in within_a_batch.get(method, ()):
        one[name] = seven[name]
    assert one == pytest.approx(seven, rel=1e-9, abs=1e-9)


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    """What comes of every method in two processes."""
    out = tmp_path_factory.mktemp("two") / "two.pt"
    launch("tests.contracts.methods", str(out))
    return torch.load(out, weights_only=False)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("family", "method"), EVERY)
def test_two_processes(family, method, whole, two):
    """Two processes of half the rows each; an evaluation of seven rows counts none twice."""
    found = Found(*two[method])
    assert_same(found, whole(family, method), FAMILIES[family].tolerance)
    if not is_evaluated(family, method):
        return
    expected = dict(whole(family, method).evaluation)
    if method in ("dpo-aot", "dpo-aot_pair"):  # an evaluation sorts within each batch
        expected["eval_loss"] = found.evaluation["eval_loss"]
    assert found.evaluation == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if family == "groups":
        has_ratio = "eval_sampling/importance_sampling_ratio/min" in expected
        assert "eval_completions/max_length" in expected and has_ratio == (method == "corrected")
