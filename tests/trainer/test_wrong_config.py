"""A config of another method is refused by every trainer before anything is loaded."""

import pytest
from datasets import Dataset

import trl
from trl.experimental.gfpo import GFPOTrainer
from trl.experimental.grpo_with_replay_buffer import GRPOWithReplayBufferTrainer
from trl.experimental.papo import PAPOTrainer
from trl.experimental.ppo import PPOTrainer

TRAINERS = [
    trl.BCOTrainer, trl.CPOTrainer, trl.DPOTrainer, trl.GRPOTrainer, trl.KTOTrainer, trl.ORPOTrainer, trl.PRMTrainer,
    trl.RewardTrainer, trl.RLOOTrainer, GFPOTrainer, GRPOWithReplayBufferTrainer, PAPOTrainer, PPOTrainer,
]  # fmt: skip


def build(kind, args):
    rows = Dataset.from_list([{"prompt": "a", "image": None}])
    online = {"reward_funcs": len} if hasattr(kind, "make_rollout_batch") else {}
    return kind(model="no/such-model", args=args, train_dataset=rows, **online)


@pytest.mark.parametrize("kind", TRAINERS, ids=lambda kind: kind.__name__)
def test_sft_settings_are_refused(tmp_path, kind):
    name = kind.__name__.replace("Trainer", "Config")
    with pytest.raises(TypeError, match=rf"args must be a [\w.]*{name}, got [\w.]*SFTConfig\. "):
        build(kind, trl.SFTConfig(str(tmp_path), use_cpu=True))


def test_settings_of_another_method_are_refused_by_sft(tmp_path):
    with pytest.raises(TypeError, match=r"args must be a SFTConfig, got GRPOConfig\. Use SFTConfig"):
        build(trl.SFTTrainer, trl.GRPOConfig(str(tmp_path), use_cpu=True))
