"""The objectives in a bare training loop against the recorded runs of the reference (../shared/golden): every step's loss,
gradient norm and metrics, without a trainer."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.objectives.group_replay import Replay

# Rows that two recorded lists share: the loss types at both levels, and one case for each setting.
CASES = [
    *(f"grpo/{loss}_{level}_beta0.04_iter2" for loss in ("grpo", "bnpo", "dr_grpo", "dapo") for level in ("token", "sequence")),
    *(f"grpo/{loss}_{level}_beta0.04_iter2" for loss in ("cispo", "sapo") for level in ("token", "sequence")),
    *(f"grpo/scale_{scale}" for scale in ("group", "batch", "none", "True", "False")),
    *(f"grpo/mask_truncated_{loss}" for loss in ("grpo", "bnpo", "dr_grpo", "dapo")),
    *(f"grpo/vllm_{mode}" for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    "grpo/vllm_cap_default", "grpo/vllm_no_correction", "grpo/vllm_iter2",
    "grpo/defaults", "grpo/delta_dapo", "grpo/delta_epsilon_grpo", "grpo/epsilon_dapo", "grpo/sequence_epsilon_grpo",
    "grpo/entropy_quantile_0.2_dapo", "grpo/entropy_quantile_0.5_grpo", "grpo/entropy_quantile_iter2_beta",
    "grpo/sapo_temperatures", "grpo/cispo_tight", "grpo/bias_correction_kl", "grpo/temperature_0.7",
    "grpo/two_rewards_weighted", "grpo/reward_none", "grpo/reward_constant", "grpo/chat", "grpo/generations_2",
    "rloo/defaults", "rloo/beta_0", "rloo/iter3", "rloo/normalize", "rloo/reward_clip", "rloo/temperature_0.7",
    "rloo/two_rewards_weighted", "rloo/reward_none", "rloo/chat", "rloo/generations_2",
]  # fmt: skip
# With num_iterations=2 the reference's RLOO draws new completions for every step; with 3 it does not.
FIRST_STEP_ONLY = ["rloo/iter2", "rloo/iter2_epsilon", "rloo/normalize_iter2_beta0", "rloo/mask_truncated"]
OF_THE_TRAINER = ("learning_rate", "epoch", "num_tokens", "completions/", "rewards/")

REWARDS = {
    "ids_mod": lambda completion_ids, **_: [(sum(ids) * 7 % 11 - 5) / 4 for ids in completion_ids],
    "text_length": lambda completions, **_: [len(text) % 9 / 3 for text in completions],
    "chat_length": lambda completions, **_: [len(turns[0]["content"]) % 9 / 3 for turns in completions],
    "sometimes_none": lambda completion_ids, **_: [
        None if len(ids) % 3 == 0 else len(ids) / 6 for ids in completion_ids
    ],
    "constant": lambda completions, **_: [1.0] * len(completions),
}


@cache
def recorded(golden: Path) -> dict:
    return json.loads((golden / "golden_public.json").read_text())["cases"]


def wavy_sampler(golden: Path, name: str):
    """Log-probs of a sampler that is not quite the initial model, as the recorded runs were given them."""
    model = AutoModelForCausalLM.from_pretrained(golden / "assets_public" / name).float().eval()

    def logps(prompt, completion, row, turn):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
        return [round(x + 0.25 * math.sin(1.7 * i + row + 3 * turn), 6) for i, x in enumerate(found)]

    return logps


@pytest.mark.parametrize("name", [*CASES, *FIRST_STEP_ONLY])
def test_a_recorded_run_is_repeated(name, shared):
    golden = shared / "golden"
    if not golden.is_dir():
        pytest.skip(f"{golden} is not present on this machine")
    case = recorded(golden)[name]
    if name in FIRST_STEP_ONLY:
        case = {**case, "kwargs": {**case["kwargs"], "max_steps": 1}}
    sampler = wavy_sampler(golden, case["model"][1]) if case.get("fake_vllm") else None
    steps = Replay(case, golden / "assets_public", REWARDS, sampler).run()
    compared = 0
    for key, values in case["result"]["steps"]["v"].items():
        if key == "loss" or key.startswith(OF_THE_TRAINER):
            continue
        for number, (found, expected) in enumerate(zip(steps, values, strict=False)):
            if expected is not None:
                assert found[key] == pytest.approx(expected, rel=2e-4, abs=2e-5), (key, number)
                compared += 1
    assert compared >= 4 * len(steps)
    assert not {key for step in steps for key in step} - set(case["result"]["steps"]["v"])
