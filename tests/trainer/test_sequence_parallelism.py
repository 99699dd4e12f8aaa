"""Tokens of a batch spread over 2 and 4 processes (gloo): one step equals that of one process, to 1e-10 in float64."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig

from tests.architectures import model_of
from tests.contracts import methods
from tests.experimental.gold_runs import gold
from tests.trainer import grpo_runs
from tests.trainer.one_step import assert_same_gradient
from tests.trainer.sequence_costs import LAYERS, LENGTHS, WIDTH
from tests.trainer.sequence_worker import RESUMED, ROLLOUTS, RUNS, SHARDED, Found, run, to_resume, weights_of
from tests.two_processes import launch
from trl.models.packed.sequence_group import SequenceGroup
from trl.models.scoring.causal import Scorer
from trl.reporting.metrics import Processes

IN_TWO_GROUPS = ("aot", "grpo-shared")
IN_SHARDS = [f"sft{SHARDED}", f"grpo{SHARDED}"]
PLANS = {
    "two": (2, 2, [*(name for name in (*RUNS, *ROLLOUTS) if name not in IN_TWO_GROUPS), *RESUMED, *IN_SHARDS]),
    "four": (4, 4, ["sft", "sft-packed", "dpo"]),
    "two-by-two": (4, 2, ["sft", "kto", *IN_TWO_GROUPS]),
}


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_equals_that_of_one_process(plan, tmp_path):
    processes, sp_size, cases = PLANS[plan]
    launch(
        "tests.trainer.sequence_worker", str(tmp_path / "found.pt"), str(sp_size), ",".join(cases), processes=processes
    )
    found = torch.load(tmp_path / "found.pt")
    for name in cases:
        if name in RESUMED:
            whole, again = found[name]
            assert all(torch.equal(whole[key], again[key]) for key in whole), name
            alone = to_resume(name, str(tmp_path / name), 1)
            alone.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-3"))
            for key, weight in weights_of(alone).items():
                torch.testing.assert_close(weight, whole[key], rtol=0, atol=1e-10, msg=f"{name} {key}")
        else:
            assert_equal(name, Found(*found[name]), run(name, 1))


def assert_equal(name: str, found: Found, expected: Found) -> None:
    exact = "routed" not in name
    for gradient, single in zip(found.gradients, expected.gradients, strict=True):
        assert_same_gradient(gradient, single, **({} if exact else {"tolerance": 1e-5}))
    for key, weight in expected.weights.items():
        torch.testing.assert_close(
            found.weights[key], weight, rtol=0, atol=1e-10 if exact else 1e-5, msg=f"{name} {key}"
        )
    for ours, theirs in zip([*found.logs, found.evaluation], [*expected.logs, expected.evaluation], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():  # transformers adds up training losses in float32
            tolerance = (
                {"rel": 1e-6 if exact else 1e-5, "abs": 1e-7}
                if key == "loss" or not exact
                else {"rel": 1e-9, "abs": 1e-10}
            )
            assert ours[key] == pytest.approx(value, **tolerance), (name, key)


@pytest.mark.parametrize("copies", [1, 2])
def test_counts_of_a_step_stay_whole_numbers(copies):
    """Beyond 2^24, where float32 has no odd ones."""
    alone = SimpleNamespace(num_processes=copies)
    assert Processes(alone, copies).once(torch.tensor(copies * 20_000_001)).tolist() == 20_000_001
    assert Processes(alone, copies).once(torch.tensor(copies * 1.5)).tolist() == 1.5


# ---- what is refused


def test_one_process_is_no_group_of_two():
    with pytest.raises(
        ValueError, match=r"sp_size must divide the number of processes, 1, got 2\. Launch a multiple of it"
    ):
        run("sft", 2)


@pytest.mark.parametrize(
    "architecture, why", [("lfm2", "Lfm2ShortConv mixes tokens too"), ("bloom", "its batches are padded")]
)
def test_models_that_mix_tokens_outside_of_attention_are_refused(architecture, why):
    group = SequenceGroup(2, 0, processes=None, number=0)
    with pytest.raises(ValueError, match=f"sp_size=2 spreads tokens over processes, not of .*{why}.*Use sp_size=1"):
        Scorer(model_of(architecture)).join(group)


def test_trainers_of_their_own_steps_are_refused():
    with pytest.raises(ValueError, match="sp_size=2 is not supported by this trainer"):
        gold(sp_size=2)


def test_processes_generate_equal_numbers():
    with pytest.raises(
        ValueError, match=r"sp_size=2 must divide the 9 completions .* Set steps_per_generation to a mul"
    ):
        grpo_runs.make(per_device_train_batch_size=9, num_generations=3, sp_size=2)


@pytest.mark.parametrize("name", ["sp_size", "cp_size"])
def test_the_sizes_of_accelerates_config_are_taken_over(name):
    with pytest.raises(ValueError, match="sp_size must divide the number of processes, 1, got 2"):
        methods.trained(
            "sft",
            parallelism_config=ParallelismConfig(cp_size=2) if name == "cp_size" else ParallelismConfig(sp_size=2),
        )


# ---- what it costs


@pytest.mark.distributed
@pytest.mark.parametrize("processes, share", [(2, 0.55), (4, 0.30)])
def test_a_process_keeps_its_share_and_sends_as_much_as_the_formula_says(processes, share, tmp_path):
    launch("tests.trainer.sequence_costs", str(tmp_path / "costs.pt"), processes=processes)
    (alone, nothing), (kept, sent) = torch.load(tmp_path / "costs.pt")
    assert kept <= share * alone and not nothing
    tokens = -(-sum(LENGTHS) // processes) * processes  # filled up
    assert sent == [tokens * WIDTH // processes] * (4 * LAYERS * 2)  # forward and backward: 4 N d / sp each
