"""Completions of current families in training, whichever route makes them: their old log-probs, pairs, agents, memory."""

from types import SimpleNamespace

import pytest
import torch

from tests.agents.tool_words import call_tokenizer
from tests.architectures import model_of
from tests.generation.test_engine_contract import scored_logps
from tests.trainer import grpo_agent_runs, grpo_runs
from trl.generation.transformers.model_generate import cache_bytes
from trl.generation.transformers.rollout_loop import default_rows

FLOAT32 = {"dtype": "float32", "max_steps": 2, "learning_rate": 1e-3}
BOTH = ["sliding_attention", "full_attention"]
# Gemma 4's layers that share keys, and those whose values are their keys: keys and values of a token, in numbers.
KEY_NUMBERS = {
    "own keys": ({}, 2 * 2 * (8 + 16)),
    "shared keys": ({"num_hidden_layers": 4, "layer_types": BOTH * 2, "num_kv_shared_layers": 2}, 2 * 2 * (8 + 16)),
    "keys as values": ({"attention_k_eq_v": True}, 2 * (2 * 8 + 16)),
}


def test_pairs_are_compared_and_trained_on():
    models = [model_of("nemotron_h", seed=seed) for seed in range(2)]
    _, keep = grpo_runs.run("online_dpo", given={"model": models[0], "ref_model": models[1]}, **FLOAT32)
    assert len(keep.steps) == 2 and all(any(bool(part.any()) for part in step.values()) for step in keep.steps)


def test_agents_train():
    words = call_tokenizer()
    model = model_of("qwen3_next", vocab_size=len(words))
    model.generation_config.eos_token_id = words.convert_tokens_to_ids(["</s>", "yes", "no", "hi", "?", "3"])
    trainer, _ = grpo_agent_runs.trained(agent=grpo_agent_runs.forgetful, given={"model": model}, **FLOAT32)
    assert [log["agent/turns"] for log in grpo_runs.logs(trainer)] == [3, 3]


@pytest.mark.parametrize("model_type", ["nemotron_h", "olmo3"])
def test_old_log_probs_are_those_of_the_scoring_forward(model_type):
    """Nemotron-H's own cache gives others, by 4e-3."""
    model = model_of(model_type, dtype=torch.float64)
    model.set_experts_implementation("eager")
    settings = {"max_steps": 1, "learning_rate": 0.0, "steps_per_generation": 2, "dtype": "float64"}
    trainer, _ = grpo_runs.run(given={"model": model}, **settings)
    rows = trainer._rollout_batch
    parts = zip(rows.prompts.split(), rows.completions.split(), strict=True)
    expected = torch.cat([scored_logps(model, prompt.tolist(), ids.tolist()) for prompt, ids in parts])
    torch.testing.assert_close(rows.per_token["old_logps"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", KEY_NUMBERS)
def test_the_models_own_cache_is_measured(name):
    """Float32 keys and values of the layers' own shapes; layers that share keys hold none."""
    fields, numbers = KEY_NUMBERS[name]
    assert cache_bytes(model_of("gemma4_text", **fields))["token_bytes"] == numbers * 4


def test_recurrent_states_are_a_rows_own():
    """A layer of linear attention: 4 kept inputs of a convolution of 64 channels, and 4 heads' states of 8 by 8."""
    sizes = cache_bytes(model_of("qwen3_next"))
    assert sizes == {"token_bytes": 2 * 2 * 8 * 4, "row_bytes": (4 * 64 + 4 * 8 * 8) * 4}


def test_rows_at_once_fit_in_the_memory():
    """A row of ten tokens has keys and values, states, and three rows of 400 logits."""
    requests = SimpleNamespace(limits={0: 6}, prompts={0: [1] * 4}, prompt_of=[0])
    sizes = {"vocabulary": 400, "token_bytes": 384, "row_bytes": 100}
    row = 384 * 10 + 100 + 12 * 400
    assert default_rows(requests, **sizes, memory=7 * row) == 7
    assert default_rows(requests, **sizes, memory=7 * row - 1) == 6
