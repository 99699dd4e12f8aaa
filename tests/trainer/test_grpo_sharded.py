"""GRPO with weights spread over two processes (FSDP2, DeepSpeed ZeRO-2 and ZeRO-3 over gloo), and in bfloat16."""

import importlib.util
import math

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import tiny_model
from tests.trainer.group_methods import comparable
from tests.trainer.grpo_runs import logs, run
from tests.trainer.grpo_sharded import KINDS, SETTINGS, four_steps
from tests.trainer.one_step import launch
from trl.rollouts.sampling import SAMPLING_LOGPS
from trl.trainer.group_trainer import CORRECTION
from trl.trainer.online_trainer import OLD


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", KINDS)
def test_sharded_runs_equal_that_of_one_process_and_go_on_within_a_window(how, tmp_path):
    """Weights to 1e-5, logs to 1e-4; a resumed run ends as the one that was not stopped."""
    if how != "fsdp2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install trl[deepspeed]")
    launch("tests.trainer.grpo_sharded", str(tmp_path), how)
    single, counts = four_steps(tiny_model("llama"), str(tmp_path / "single"))
    assert counts == {"generate": 2, "score_rollout": 4, "load_window": 0}
    expected, first = single.model.state_dict(), tiny_model("llama").state_dict()
    assert max(float((weight - first[name]).abs().max()) for name, weight in expected.items()) > 1e-3
    for end, windows in (("whole", 2), ("resumed", 0)):
        weights = load_file(tmp_path / end / "model.safetensors")
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5, msg=name)
        found = torch.load(tmp_path / f"{end}.pt")
        for one, other in zip(found["logs"], logs(single), strict=True):
            assert one.keys() == other.keys()
            for name in comparable(other):
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), (end, name)
        assert found["counts"]["generate"] == windows  # the weights are gathered once for each
        assert found["counts"]["load_window"] == (end == "resumed")


def test_bfloat16_asks_the_policy_again_and_corrects_for_the_sampler():
    settings = {**SETTINGS, "save_strategy": "no", "bf16": True, "num_iterations": 2, "architecture": "llama"}
    trainer, _ = run(**settings)
    assert not trainer.sampler_is_exact
    columns = trainer._window.per_token
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
