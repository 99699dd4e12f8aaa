"""Tiny decoder models built from configs, a few tens of thousands of parameters each: nothing is downloaded.

The initial weights are wide (`initializer_range=0.3`), so that logits differ clearly from token to token and a test that
compares outputs would notice a wrong mask or position.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

_HEADS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_NO_HEAD_DIM = {key: value for key, value in _HEADS.items() if key != "head_dim"}
_NO_GROUPS = {key: value for key, value in _HEADS.items() if key not in ("num_key_value_heads", "head_dim")}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# architecture -> fields of its config; every architecture also gets _SHARED.
_FIELDS: dict[str, dict] = {
    "llama": _HEADS,
    "qwen2": _NO_HEAD_DIM,
    "qwen3": _HEADS,
    "mistral": {**_HEADS, "sliding_window": None},
    "gemma": _HEADS,
    # SDPA has no soft cap: transformers 5.19 leaves the cap out, 5.23 refuses SDPA.
    "gemma2": {**_HEADS, "query_pre_attn_scalar": 8, "sliding_window": 256, "attn_implementation": "eager"},
    "gemma3_text": {**_HEADS, "query_pre_attn_scalar": 8, "sliding_window": 256},
    "phi3": _NO_HEAD_DIM,
    "cohere": {**_NO_HEAD_DIM, "logit_scale": 0.25},
    "olmo2": _NO_HEAD_DIM,
    "granite": {**_NO_HEAD_DIM, "logits_scaling": 2.0},
    "mixtral": {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_NO_HEAD_DIM, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "gpt_neox": {**_NO_GROUPS, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "init_std": 0.3,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "falcon": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
# Encoders, encoder-decoders and a decoder with grouped heads and no norm in float32: not among ARCHITECTURES.
_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "initializer_factor": 3.0, "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
    "init_std": 0.3, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_OTHER_FIELDS: dict[str, dict] = {
    "starcoder2": {
        **_NO_HEAD_DIM,
        "sliding_window": None,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "bert": {**_ENCODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": _T5,
    "mt5": {**_T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
    "bart": _BART,
    "marian": {**_BART, "decoder_start_token_id": 0},
    "pegasus": {**_BART, "decoder_start_token_id": 0},
}
_SHARED = {
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_BUILT: dict[tuple, PreTrainedModel] = {}  # what copies are made of

ARCHITECTURES = tuple(_FIELDS)
SOFT_CAPPED = ("gemma2",)  # their eager attention takes its softmax in float32, whatever the model's dtype


def tiny_config(architecture: str, **overrides) -> PretrainedConfig:
    """The config of a two-layer, 32-wide decoder: vocabulary 96, 256 positions, no dropout.

    `architecture` is a `model_type` of transformers, one of `ARCHITECTURES`, or an encoder or encoder-decoder of
    `_OTHER_FIELDS`; `overrides` win over every field.
    """
    fields = {**_SHARED, **{**_FIELDS, **_OTHER_FIELDS}[architecture], **overrides}
    return AutoConfig.for_model(architecture, **fields)


def tiny_model(architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides) -> PreTrainedModel:
    """A model of `tiny_config`, in eval mode, whose weights depend on `seed` only; the global generator is left alone."""
    return _from_config(AutoModelForCausalLM, architecture, dtype, seed, overrides)


def tiny_classifier(
    architecture: str,
    *,
    of_tokens: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides,
) -> PreTrainedModel:
    """The same with a head for classes, of sequences or `of_tokens` (3 labels unless `num_labels` says otherwise)."""
    auto = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    overrides = {"num_labels": 3, "classifier_dropout": 0.0, **overrides}
    return _from_config(auto, architecture, dtype, seed, overrides)


def tiny_seq2seq(
    architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides
) -> PreTrainedModel:
    """A tiny encoder-decoder: t5, mt5, bart, marian or pegasus."""
    return _from_config(AutoModelForSeq2SeqLM, architecture, dtype, seed, overrides)


def _from_config(auto, architecture: str, dtype: torch.dtype, seed: int, overrides: dict) -> PreTrainedModel:
    def build() -> PreTrainedModel:
        config = tiny_config(architecture, **overrides)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(config, dtype=torch.float32)
        return model.to(dtype).eval()

    return copy_of((auto, architecture, dtype, seed, repr(sorted(overrides.items()))), build)


def copy_of(key: tuple, build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A copy of the model that the process built first under `key`: 2 ms instead of 15."""
    if key not in _BUILT:
        _BUILT[key] = build()
    return _copied(_BUILT[key], {})


def _copied(module: torch.nn.Module, memo: dict) -> Any:
    """`copy.deepcopy` of a module, three times as fast: most of what a module holds are empty dictionaries of hooks."""
    if id(module) not in memo:
        memo[id(module)] = new = module.__class__.__new__(module.__class__)
        for name, value in module.__dict__.items():
            if name == "_modules":
                value = {key: None if part is None else _copied(part, memo) for key, part in value.items()}
            elif not value and type(value) in (OrderedDict, dict, list, set):
                value = type(value)()
            else:
                value = copy.deepcopy(value, memo)
            new.__dict__[name] = value
    return memo[id(module)]
