"""Small names of `trl.trainer.utils` for loops of a user's own; those of models and generation are tested there."""

import json
import os
import socket

import pytest
from accelerate import Accelerator
from torch import nn
from transformers import TrainerState

from trl.experimental.ppo import PPOConfig
from trl.trainer.utils import (
    OnlineTrainerState,
    OnPolicyConfig,
    add_bos_token_if_needed,
    add_eos_token_if_needed,
    ensure_master_addr_port,
    prepare_deepspeed,
)


def prompt(ids):
    return {"prompt_input_ids": ids, "prompt_attention_mask": [1] * len(ids)}


def answer(ids):
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


@pytest.mark.parametrize(
    ("bos", "ids", "expected"),
    [(1, [[5], [1, 5], []], [[1, 5], [1, 5], [1]]), (None, [[5], [], [1]], [[5], [], [1]])],
)
def test_prompts_begin_with_the_begin_token_once(bos, ids, expected):
    given = [part for each in ids for part in (len(each), prompt(each))]
    assert list(add_bos_token_if_needed(bos, *given)) == [prompt(each) for each in expected]


def test_answers_end_with_the_end_token_once():
    found = add_eos_token_if_needed(2, answer([7, 2]), answer([]))
    assert found == (answer([7, 2]), answer([2]))


def test_a_place_to_meet(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ensure_master_addr_port()
    assert os.environ["MASTER_ADDR"] == "localhost"
    with socket.socket() as server:
        server.bind(("localhost", int(os.environ["MASTER_PORT"])))
    chosen = os.environ["MASTER_PORT"]
    ensure_master_addr_port()
    assert os.environ["MASTER_PORT"] == chosen
    ensure_master_addr_port("10.0.0.1", 4321)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "4321")


def test_episodes_are_part_of_the_saved_state(tmp_path):
    state = OnlineTrainerState(episode=96, global_step=3)
    assert isinstance(state, TrainerState)
    state.save_to_json(str(tmp_path / "state.json"))
    assert json.loads((tmp_path / "state.json").read_text())["episode"] == 96
    assert OnlineTrainerState.load_from_json(str(tmp_path / "state.json")).episode == 96


def test_settings_of_a_loop():
    args = OnPolicyConfig("x", use_cpu=True, total_episodes=10, batch_size=4)
    assert (args.world_size, args.batch_size, args.response_length) == (1, 4, 53)
    assert issubclass(PPOConfig, OnPolicyConfig) and PPOConfig("x", use_cpu=True).world_size == 1
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        OnPolicyConfig("x", use_cpu=True, temperature=0.0)


def test_deepspeed_is_needed_for_a_model_of_deepspeed():
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="needs a run under DeepSpeed"):
        prepare_deepspeed(nn.Linear(1, 1), 2)
