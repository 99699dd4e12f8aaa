"""Architectures that are not among those of our cache generate, are scored and trained as they are."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.trainer.resume_worker import tokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine
from trl.generation.transformers.model_generate import cache_bytes
from trl.generation.transformers.rollout_loop import default_rows
from trl.models.scoring.causal import Scorer

SHARED = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
BOTH = ["sliding_attention", "full_attention"]
GEMMA4 = {"global_head_dim": 16, "layer_types": BOTH, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 400, "sliding_window": 64}  # fmt: skip
ALL_LAYERS = {"num_hidden_layers": 4, "layer_types": BOTH * 2, "num_kv_shared_layers": 2}
# Types of models, with an addition where there are several, and their fields.
MODELS = {
    "gemma4_text": GEMMA4,
    "gemma4_text shared layers": {**GEMMA4, **ALL_LAYERS},
    "gemma4_text shared projections": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    "gemma3n_text": {
        **ALL_LAYERS, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 400, "laurel_rank": 4, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 64,
    },
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    "glm4": {},
    "smollm3": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_layers": [1]},
}  # fmt: skip
KEY_NUMBERS = {"gemma4_text": 2 * (8 + 16), "gemma4_text shared layers": 2 * (8 + 16), "gemma4_text shared projections": 2 * 8 + 16}  # fmt: skip


def made(name: str):
    kind, _, _ = name.partition(" ")
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHARED, **MODELS[name]})).eval()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate_and_their_log_probs_those_of_the_scoring_forward(name):
    model = made(name)
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12] * 9]
    found = TransformersEngine(model).generate(prompts, Sampling(max_new_tokens=8, top_k=1, stop_token_ids=()))
    for prompt, own in zip(prompts, found, strict=True):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert list(own.ids) == ids[0, len(prompt) :].tolist()
    sampled = TransformersEngine(model).generate(prompts, Sampling(max_new_tokens=8, stop_token_ids=(), seed=3))
    rows = [torch.tensor([*prompt, *own.ids]) for prompt, own in zip(prompts, sampled, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {
        "input_ids": pad(rows, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
    }
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, prompt in enumerate(prompts):
        batch["labels"][row, : len(prompt)] = -100
    logps = Scorer(model).score(model, batch).logps
    expected = torch.cat([torch.as_tensor(own.logps) for own in sampled]).to(logps)
    torch.testing.assert_close(logps.detach(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("name", MODELS)
def test_group_methods_train(name, trainer, tmp_path):
    kind, model = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}[trainer], made(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    args = kind(
        str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=8, max_steps=2, use_cpu=True,
        report_to="none", save_strategy="no", learning_rate=1e-3, logging_steps=1,
    )  # fmt: skip
    runs = trainer(
        model=model, reward_funcs=lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids], args=args,
        train_dataset=Dataset.from_list([{"prompt": "the sun"}, {"prompt": "a river"}]), processing_class=tokenizer(),
    )  # fmt: skip
    runs.train()
    assert all(log["grad_norm"] > 0 for log in runs.state.log_history[:2])
    assert any(not torch.equal(value, before[key]) for key, value in model.named_parameters())


@pytest.mark.parametrize("name", KEY_NUMBERS)
def test_the_models_own_cache_is_measured(name):
    """Float32 keys and values of the layers' own shapes; layers that share keys hold none."""
    assert cache_bytes(made(name))["token_bytes"] == 2 * KEY_NUMBERS[name] * 4


def test_recurrent_states_are_a_rows_own():
    """A layer of linear attention: 3 kept inputs of a convolution of 48 channels, and 4 heads' states of 8 by 8."""
    sizes = cache_bytes(made("qwen3_next"))
    assert sizes == {"token_bytes": 2 * 2 * 8 * 4, "row_bytes": (4 * 64 + 4 * 8 * 8) * 4}


def test_rows_at_once_fit_in_the_memory():
    """A row of ten tokens has keys and values, states, and three rows of 400 logits."""
    requests = SimpleNamespace(limits={0: 6}, prompts={0: [1] * 4}, prompt_of=[0])
    sizes = {"vocabulary": 400, "token_bytes": 384, "row_bytes": 100}
    row = 384 * 10 + 100 + 12 * 400
    assert default_rows(requests, **sizes, memory=7 * row) == 7
    assert default_rows(requests, **sizes, memory=7 * row - 1) == 6
