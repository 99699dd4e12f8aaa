"""A small copy of a decoder with random weights, on which questions about its architecture are answered in no time."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)

_HEADS, _WIDTH, _VOCABULARY, _INNER = 4, 32, 96, 64
_WINDOW = 6  # tokens that a layer reaches back: rows of a test are longer
_MOST_WEIGHTS = 10**7
# Fields of configs that set a size, and their values in a copy; other names of the same field stand beside it.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_dim", "emb_dim", "lru_width"), _WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 256),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("swa_num_attention_heads", "num_attention_heads_per_layer", "linear_num_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "attention_head_size"), _WIDTH // _HEADS),
    "global_head_dim": 16, "attention_hidden_size": 64, "attention_head_dim": 16, "query_pre_attn_scalar": 8,
    "rotary_dim": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "qk_head_dim": 12, "v_head_dim": 6,
    "swa_v_head_dim": 6, "q_lora_rank": 16, "kv_lora_rank": 12, "o_lora_rank": 8, "o_groups": 2,
    # feed-forward layers and experts
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1), "zero_expert_num": 2,
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    "hidden_size_per_layer_input": 8, "laurel_rank": 4, "dim_model_base": 16, "adapter_rank": 4, "num_mem_blocks": 1,
    # linear attention and state spaces: their heads have `_INNER` channels together
    "linear_head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_value_heads": 4,
    **dict.fromkeys(("expand", "mamba_expand"), 2), "mamba_d_ssm": _INNER,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), _HEADS),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), _INNER // _HEADS),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4), "block_multiple_of": 16,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8), "block_size": 4,
    # what a token reaches
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "attention_window_size"), _WINDOW),
    **dict.fromkeys(("index_topk", "floor_scale"), 4), "index_head_dim": 8, "index_n_heads": 2,
}  # fmt: skip
_AT_MOST_TWO = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "n_groups", "mamba_n_groups",
    "mamba_ngroups",
)  # fmt: skip
# Heads of keys, and those of queries: as many, or half as many, or one.
_KEY_HEADS = {
    "num_key_value_heads": "num_attention_heads", "num_kv_heads": "num_attention_heads",
    "num_query_groups": "num_attention_heads", "num_global_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads", "linear_num_key_heads": "linear_num_value_heads",
}  # fmt: skip
# Layers by number: the first or the last so many are of another kind, or those that are listed.
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
_LAST_LAYERS = ("num_kv_shared_layers",)
_LISTED_LAYERS = (
    "attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids", "moe_layers", "mlp_only_layers", "ple_layer_ids",
)  # fmt: skip
_PERIODS = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "decoder_sparse_step": 1, "moe_layer_interval": 1,
}  # fmt: skip
_NOT_OF_LAYERS = ("_multipliers", "_limit", "_token_id", "architectures")  # ends of the names of other lists


def small_copy(config: PretrainedConfig, *, narrow: bool = True) -> PretrainedConfig:
    """A config of the same architecture: a layer of each kind, at least two layers, and, if `narrow`, small sizes.

    Windows and chunks become shorter than ten tokens, so that rows of a few tokens reach them.
    """
    small = copy.deepcopy(config)
    vars(small).pop("quantization_config", None)
    small.use_cache = False  # as trainers set it: copies from before and after are one
    if narrow:
        _narrow(small)
    if kinds := layer_kinds(small):
        kept = {kinds.index(kind) for kind in kinds}
        _keep_layers(small, sorted(kept | ({0, min(1, len(kinds) - 1)} if len(kept) == 1 else set())))
    return small


def small_model(
    kind: type[Model], config: PretrainedConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Model:
    """A model of a `small_copy` on the CPU, in eval mode, with eager attention and weights that depend on `seed` only.

    All weights are drawn, those too that a new model has at zero. Random generators and defaults are left alone.
    Raises: ValueError for a config whose sizes are large still.
    """
    config = copy.deepcopy(config)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    with on_cpu(dtype):
        with torch.device("meta"):
            weights = sum(value.numel() for value in kind(config).parameters())
        if weights > _MOST_WEIGHTS:
            raise ValueError(f"a copy must have at most {_MOST_WEIGHTS} weights, got {weights}. Narrow its config.")
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would set those of GPUs too
        model = kind(config)
        for value in model.parameters():
            if value.is_floating_point():
                value.data += 0.1 * torch.randn(value.shape)
    nn.Module.to(model, dtype)
    return model.eval().requires_grad_(False)


@contextmanager
def on_cpu(dtype: torch.dtype) -> Iterator[None]:
    """A block whose defaults are the CPU and `dtype`, without autocast; the CPU's generator is restored."""
    before = torch.get_default_dtype()
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, without those that torch derives from it (FSDP2)."""
    kinds = (kind for kind in type(module).__mro__ if not kind.__module__.startswith(("torch.", "builtins")))
    return next(kinds, type(module))


def is_close(values: Tensor, expected: Tensor, *, tolerance: float) -> bool:
    """Whether tensors differ by at most `tolerance` of the largest expected entry; False for NaN."""
    return bool((values - expected).abs().max() <= tolerance * expected.abs().max())


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its message, at most 200 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _narrow(config: PretrainedConfig) -> None:
    fields = vars(config)
    sizes = {**_SIZES, **_inner_sizes(fields)}
    for name in _KEY_HEADS.keys() & fields.keys():
        heads, keys = getattr(config, _KEY_HEADS[name], None), fields[name]
        sizes[name] = _HEADS if keys == heads else min(2, keys or 1)
    for name, value in list(fields.items()):
        if _is_size(value):
            if name in sizes:
                setattr(config, name, sizes[name])
            elif name in _AT_MOST_TWO:
                setattr(config, name, min(2, value))
            elif name.endswith("_token_id"):
                setattr(config, name, value % 3)
        elif isinstance(value, list) and name in sizes and all(map(_is_size, value)):  # one for each layer
            setattr(config, name, [sizes[name]] * len(value))
        elif isinstance(value, list) and name.endswith("_token_id"):
            setattr(config, name, [2])


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _inner_sizes(fields: Mapping[str, object]) -> dict[str, int]:
    """Sizes that mean something else beside other fields."""
    width, projected = (fields.get(name) for name in ("hidden_size", "word_embed_proj_dim"))  # OPT
    sizes = {"word_embed_proj_dim": _WIDTH if width == projected else 16}
    if "qk_rope_head_dim" in fields:
        sizes["head_dim"] = _SIZES["qk_rope_head_dim"]
    if "expand" in fields and "num_attention_heads" not in fields:  # Mamba
        sizes |= {"head_dim": _INNER // _HEADS, "intermediate_size": _INNER}
    if fields.get("attention_hidden_size") == width:
        sizes["attention_hidden_size"] = _WIDTH
    rope, heads = fields.get("rope_parameters"), fields.get("num_attention_heads")
    if isinstance(rope, dict) and any(isinstance(value, list) for value in rope.values()):
        # A list has as many entries as a head has angles, or such a sum.
        size = fields.get("head_dim")
        if isinstance(size, int):
            sizes["head_dim"] = size
        elif isinstance(width, int) and isinstance(heads, int):
            sizes["hidden_size"] = width // heads * _HEADS
    return sizes


def keep_layers(config: PretrainedConfig, kept: Sequence[int]) -> PretrainedConfig:
    """A config of the same model with some of its layers, in order."""
    copied = copy.deepcopy(config)
    _keep_layers(copied, kept)
    return copied


def layer_kinds(config: PretrainedConfig) -> list[tuple[object, ...]]:
    """The kind of each layer: kinds differ in what lists say of them and in which counts of layers they are."""
    total = getattr(config, "num_hidden_layers", 0)
    if not isinstance(total, int) or total < 1:
        return []
    lists, listed, first, last, cycle = _of_layers(vars(config), total)
    return [
        (
            *(str(values[layer]) for values in lists.values()), *(layer in numbers for numbers in listed.values()),
            *(layer < count for count in first.values()), *(layer >= total - count for count in last.values()),
            cycle[layer % len(cycle)] if cycle else None,
        )
        for layer in range(total)
    ]  # fmt: skip


class _OfLayers(NamedTuple):
    """Fields that say something of each layer, by name."""

    lists: dict[str, Sequence[object]]
    listed: dict[str, Sequence[int]]
    first: dict[str, int]
    last: dict[str, int]
    cycle: list[object]


def _of_layers(fields: Mapping[str, Any], total: int) -> _OfLayers:
    cycle = fields.get("block_types")  # RecurrentGemma's, repeated
    return _OfLayers(
        {name: value for name, value in fields.items() if _is_of_layers(name, value, total)},
        {name: value for name in _LISTED_LAYERS if isinstance(value := fields.get(name), (list, tuple))},
        {name: value for name in _FIRST_LAYERS if isinstance(value := fields.get(name), int)},
        {name: value for name in _LAST_LAYERS if isinstance(value := fields.get(name), int)},
        cycle if isinstance(cycle, list) else [],
    )


def _keep_layers(config: PretrainedConfig, kept: Sequence[int]) -> None:
    total, fields = config.num_hidden_layers, vars(config)
    lists, listed, first, last, cycle = _of_layers(fields, total)
    for name, values in lists.items():
        kind: Any = type(values)
        setattr(config, name, kind(values[layer] for layer in kept))
    for name, numbers in listed.items():
        setattr(config, name, [place for place, layer in enumerate(kept) if layer in numbers])
    for name, count in first.items():
        setattr(config, name, sum(layer < count for layer in kept))
    for name, count in last.items():
        setattr(config, name, sum(layer >= total - count for layer in kept))
    if cycle:
        config.block_types = [cycle[layer % len(cycle)] for layer in kept]
    for name in _PERIODS.keys() & fields.keys():
        setattr(config, name, _PERIODS[name])
    if "moe_layer_end_index" in fields:
        config.moe_layer_end_index = len(kept) - 1
    if "num_layers" in fields and fields["num_layers"] != total:  # LongCat's layers are pairs
        config.num_layers = len(kept)
        config.num_hidden_layers = 2 * len(kept)
    else:
        config.num_hidden_layers = len(kept)


def _is_of_layers(name: str, value: object, total: int) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) == total
    return is_list and name not in _LISTED_LAYERS and not name.endswith(_NOT_OF_LAYERS)
