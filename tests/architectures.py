"""Tiny decoders of many `model_type`s, built from configs with the real patterns of layers: nothing is downloaded.

`SHARED` holds the fields of all types (where a type's config lacks one it is left out), `FIELDS` what a type has besides:
two to four layers, one of each kind that the real models have, windows of 6 tokens, 4 experts of which 2 are chosen.
`CURRENT` are the families of which whole runs are tested.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.tiny import copy_of

WINDOW = 6  # tokens
SHARED: dict[str, Any] = {
    "vocab_size": 96, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW, "attention_dropout": 0.0, "residual_dropout": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "hidden_dropout": 0.0, "embedding_dropout": 0.0,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    # latent attention
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    # linear attention and state spaces
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
}  # fmt: skip
_ALL_HEADS = {"num_key_value_heads": 4}
_WINDOW_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_LATENT = {**_ALL_HEADS, "head_dim": 4}

FIELDS: dict[str, dict[str, Any]] = {
    "afmoe": {**_WINDOW_THEN_FULL, "num_dense_layers": 1, "num_shared_experts": 1},
    "apertus": {},
    "arcee": {},
    "bamba": {"attn_layer_indices": [1]},
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**_WINDOW_THEN_FULL, "logit_scale": 0.25},
    "cwm": _WINDOW_THEN_FULL,
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
    "diffllama": {},
    "doge": {"keep_window_size": 256},
    "dots1": {**_WINDOW_THEN_FULL, **_ALL_HEADS, "max_window_layers": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "exaone4": {**_WINDOW_THEN_FULL, "sliding_window_pattern": 2},
    "exaone_moe": {**_WINDOW_THEN_FULL, "sliding_window_pattern": 2, "num_shared_experts": 1},
    "falcon": {},
    "falcon_h1": {"mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64},
    "flex_olmo": {},
    "gemma": {},
    # SDPA has no soft cap: transformers 5.19 leaves the cap out, 5.23 refuses SDPA.
    "gemma2": {**_WINDOW_THEN_FULL, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "gemma3_text": {**_WINDOW_THEN_FULL, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [48] * 4, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **_WINDOW_THEN_FULL, "global_head_dim": 16, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96, "num_experts": None,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {"use_qk_norm": True},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": {**_LATENT, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gpt_neox": {},
    "gpt_oss": _WINDOW_THEN_FULL,
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": {"logits_scaling": 2.0},
    "granite_swa": _WINDOW_THEN_FULL,
    "granitemoe": {},
    "granitemoe_swa": _WINDOW_THEN_FULL,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "jais2": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "jetmoe": {"kv_channels": 8, "num_attention_heads": 4},
    "kimi_linear": {
        "num_key_value_heads": 4, "num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4,
        **_LINEAR_THEN_FULL, "head_dim": 8,
    },
    "laguna": _WINDOW_THEN_FULL,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": {},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "intermediate_size_mlp": 48,
        "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1,
    },
    "longcat_flash": {
        **_LATENT, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "zero_expert_num": 2,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8, "expand": 2},
    "mellum": _WINDOW_THEN_FULL,
    "mimo_v2_flash": {
        **_WINDOW_THEN_FULL, "head_dim": 12, "v_head_dim": 8, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 12, "swa_v_head_dim": 8,
    },
    "minicpm3": {**_LATENT, "dim_model_base": 16},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "minimax_m2": {},
    "ministral": _WINDOW_THEN_FULL,
    "ministral3": {"sliding_window": None},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "ssm_state_size": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "conv_kernel": 4, "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 24, "mamba_ssm_cache_dtype": "float32",
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW_THEN_FULL,
    "olmo_hybrid": {**_LINEAR_THEN_FULL, "linear_num_key_heads": 4},
    "olmoe": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.3},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": None},
    "phimoe": {"router_jitter_noise": 0.0},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5_moe_text": _LINEAR_THEN_FULL,
    "qwen3_5_text": _LINEAR_THEN_FULL,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR_THEN_FULL,
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": WINDOW,
        "w_init_variance_scale": 0.1,
    },
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2, "sliding_window": None},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {**_WINDOW_THEN_FULL, "query_pre_attn_scalar": 8},
    "youtu": _LATENT,
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "n_mamba_heads": 4, "mamba_headdim": 16,
        "mamba_ngroups": 1, "chunk_size": 8, "attention_hidden_size": 64, "attention_head_dim": 16, "adapter_rank": 4,
    },
}  # fmt: skip
MODEL_TYPES = tuple(FIELDS)
CURRENT = (
    "qwen3_5_text", "qwen3_next", "gemma4_text", "gpt_oss", "glm4_moe", "lfm2", "nemotron_h", "deepseek_v3", "olmo3",
    "llama4_text",
)  # fmt: skip


def config_of(model_type: str, **overrides: Any) -> PretrainedConfig:
    """The config of a tiny decoder of one of `MODEL_TYPES`; `overrides` win over every field."""
    names = AutoConfig.for_model(model_type).to_dict()
    fields = {name: value for name, value in SHARED.items() if name in names}
    return AutoConfig.for_model(model_type, **{**fields, **FIELDS[model_type], **overrides})


def model_of(
    model_type: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A model of `config_of`, in eval mode, whose weights depend on `seed` only; the global generator is left alone.

    Correction biases of routers and matrices that begin at zero are drawn too.
    """

    def build() -> PreTrainedModel:
        config = config_of(model_type, **overrides)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, value in [*model.named_parameters(), *model.named_buffers()]:
                is_matrix = isinstance(value, torch.nn.Parameter) and value.ndim > 1
                if name.endswith(("e_score_correction_bias", "expert_bias")) or (is_matrix and not value.any()):
                    torch.nn.init.normal_(value.data, std=0.3)
        return model.to(dtype).eval()

    return copy_of((model_type, dtype, seed, repr(sorted(overrides.items()))), build)
