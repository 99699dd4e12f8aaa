"""A small copy of a config has one layer of each kind, and its model is built from its seed alone."""

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM, LlamaModel

from trl.models.packed.small_copy import on_cpu, small_copy, small_model

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_next", {"layer_types": [LINEAR, FULL], "num_hidden_layers": 2, "num_key_value_heads": 2}),
        # Layers that are sparse, that are not, and that have the keys of others.
        (
            "gemma3n_text",
            {"layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2, "intermediate_size": [48] * 6},
        ),
        ("deepseek_v3", {"first_k_dense_replace": 1, "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 4}),
        ("bamba", {"attn_layer_indices": [1], "num_hidden_layers": 2}),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2}),
        ("zamba2", {"layers_block_type": [LINEAR, "hybrid"], "hybrid_layer_ids": [1], "attention_hidden_size": 64}),
        ("recurrent_gemma", {"block_types": ["recurrent", "attention"], "attention_window_size": 6}),
        ("llama4_text", {"no_rope_layers": [1, 0], "floor_scale": 4, "attention_chunk_size": 6, "moe_layers": [0, 1]}),
        ("qwen2", {"layer_types": [FULL] * 2, "hidden_size": 32, "vocab_size": 96, "num_key_value_heads": 4}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_one_layer_of_each_kind_is_kept_of_a_real_config(model_type, fields):
    real = {"attn_layer_indices": [9, 18]} if model_type == "bamba" else {}
    config = AutoConfig.for_model(model_type, **real)
    before = config.to_json_string()
    small = small_copy(config)
    assert {name: getattr(small, name) for name in fields} == fields
    assert config.to_json_string() == before


def test_a_head_has_its_size_where_rotary_angles_are_listed():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}
    small = small_copy(AutoConfig.for_model("phi3", rope_parameters=rope))
    assert small.hidden_size // small.num_attention_heads == 96
    assert small_copy(AutoConfig.for_model("qwen2"), narrow=False).hidden_size == 4096


def test_weights_depend_on_the_seed_alone():
    config = small_copy(AutoConfig.for_model("llama"))
    models = [small_model(kind, config) for kind in (LlamaModel, LlamaForCausalLM)]
    before = torch.random.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            models.append(small_model(LlamaModel, config))
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(value.device.type == "cpu" and value.dtype == torch.float64 for value in models[2].parameters())
    with on_cpu(torch.float64):
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(models[0](input_ids=ids)[0], models[2](input_ids=ids)[0])
        assert not torch.equal(models[0](input_ids=ids)[0], small_model(LlamaModel, config, seed=1)(input_ids=ids)[0])


def test_a_config_that_stays_large_is_refused():
    with pytest.raises(ValueError, match="at most 10000000 weights"):
        small_model(LlamaModel, AutoConfig.for_model("llama"))
