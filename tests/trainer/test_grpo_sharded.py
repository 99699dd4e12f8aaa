"""GRPO and distillation with weights spread over two processes (FSDP2, DeepSpeed ZeRO-2 and ZeRO-3 over gloo); bfloat16."""

import functools
import math

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.group_methods import comparable
from tests.trainer.grpo_runs import logs, run
from tests.trainer.grpo_sharded import (
    KINDS,
    OF_AGENTS,
    OF_GRPO,
    OF_TEACHERS,
    SETTINGS,
    finished,
    models_of,
    policy_of,
)
from tests.two_processes import launch, need_deepspeed
from trl.agents.journal import _records
from trl.rollouts.experience import CORRECTION, OLD, SAMPLING_LOGPS


@pytest.fixture(scope="session")
def single(tmp_path_factory):
    """A run of one process, by its name: the trainer and its counts."""
    return functools.cache(lambda name: finished(name, models_of(name), str(tmp_path_factory.mktemp("single"))))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", KINDS)
def test_sharded_runs_equal_that_of_one_process_and_go_on_within_a_window(how, single, tmp_path):
    """Weights to 1e-5, logs to 1e-4; a resumed run ends as the one that was not stopped.

    With tools, a process whose rows have all ended takes part in gathering the weights for as long as the other goes on.
    """
    need_deepspeed(how)
    launch("tests.trainer.grpo_sharded", str(tmp_path), how, *OF_GRPO)
    assert single("whole")[1] == {
        "generate": 3,
        "nothing": 0,
        "live": 0,
        "score_rollout": 4,
        "load_rollout_batch": 0,
    }
    assert single("tools")[1] == {
        "generate": 4,
        "nothing": 0,
        "live": 0,
        "score_rollout": 2,
        "load_rollout_batch": 0,
    }
    found = {name: [torch.load(tmp_path / f"{name}_{rank}.pt")["counts"] for rank in (0, 1)] for name in OF_GRPO}
    for name in OF_GRPO:
        trainer, _ = single("tools" if name == "tools" else "whole")
        assert_same_end(tmp_path / name, trainer, policy_of(name).state_dict())
    # The weights are gathered once for each window, or turn of all, and for the sample at the end.
    for own in found["whole"]:
        assert (own["generate"], own["nothing"], own["load_rollout_batch"]) == (3, 0, 0)
    assert [(own["generate"], own["load_rollout_batch"]) for own in found["resumed"]] == [(0, 1), (0, 1)]
    turns = [(own["generate"], own["nothing"]) for own in found["tools"]]
    assert turns == ([(4, 2), (4, 0)] if how != "zero2" else [(2, 0), (4, 0)])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", ["fsdp2", "zero3"])
def test_sharded_distillation_equals_that_of_one_process(how, single, tmp_path):
    """Teachers: another model, an average of the student (SDFT) and the student itself (SDPO), sharded like it."""
    need_deepspeed(how)
    launch("tests.trainer.grpo_sharded", str(tmp_path), how, *OF_TEACHERS)
    for name in OF_TEACHERS:
        assert_same_end(tmp_path / name, single(name)[0], policy_of(name).state_dict())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", ["fsdp2", "zero3"])
def test_sharded_runs_with_agents_take_the_sessions_that_ended(how, single, tmp_path):
    """One process finds all its sessions of the second batch and gathers the weights for the other, which finds none."""
    need_deepspeed(how)
    launch("tests.trainer.grpo_sharded", str(tmp_path), how, *OF_AGENTS)
    assert_same_end(tmp_path / "agents", single("agents")[0], policy_of("agents").state_dict())
    again, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("agents-again", "agents"))
    for name, weight in whole.items():
        torch.testing.assert_close(again[name], weight, rtol=1e-5, atol=1e-5)
    counts = [torch.load(tmp_path / f"agents-again_{rank}.pt")["counts"] for rank in (0, 1)]
    assert [each["live"] for each in counts] == [1, 1]
    files = sorted(file.name for file in (tmp_path / "sessions").glob("*.jsonl"))
    assert [len(list(_records(tmp_path / "sessions", file))) for file in files] == [4] * 4


def assert_same_end(saved, single, first):
    """Weights and logs that two processes saved are those of the one."""
    expected = single.model.state_dict()
    assert max(float((weight - first[name]).abs().max()) for name, weight in expected.items()) > 1e-3
    for name, weight in load_file(saved / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    entries = torch.load(saved.with_name(f"{saved.name}_0.pt"))["logs"]
    for one, known in zip(entries, logs(single), strict=True):
        assert one.keys() == known.keys()
        for name in comparable(known):
            assert one[name] == pytest.approx(known[name], rel=1e-4, abs=1e-4), (saved.name, name)


def test_bfloat16_asks_the_policy_again_and_corrects_for_the_sampler():
    settings = {**SETTINGS, "save_strategy": "no", "bf16": True, "num_iterations": 2, "architecture": "llama"}
    trainer, _ = run(**settings)
    assert not trainer.sampler_is_exact
    columns = trainer._rollout_batch.per_token
    assert not torch.equal(columns[OLD], columns[SAMPLING_LOGPS])
    torch.testing.assert_close(columns[OLD], columns[SAMPLING_LOGPS], rtol=0, atol=0.1)
    factors = columns[CORRECTION]
    assert factors.unique().numel() > 1 and (factors - 1).abs().max() < 0.5
    found = logs(trainer)
    assert len(found) == 4
    for entry in found:
        assert all(math.isfinite(value) for value in entry.values())
    assert 0.5 < found[0]["sampling/importance_sampling_ratio/mean"] < 1.5
    assert found[0]["sampling/sampling_logp_difference/max"] > 0
    assert all(weight.dtype == torch.float32 for weight in trainer.model.parameters())
