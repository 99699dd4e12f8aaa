"""One optimiser step of supervised fine-tuning, written by hand in two ways: what our step is compared with.

Both know nothing of `trl`. `Bare` computes real tokens and completion logits only; `Padded` is the usual short loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.data import Row
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.integrations.sdpa_attention import repeat_kv

IGNORED = -100
BARE_ATTENTION = "benchmark_bare"

# Decoder bodies by name: parameters without the embedding of a large vocabulary.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2},
    "5m": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "num_attention_heads": 4},
    "30m": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 9, "num_attention_heads": 8},
    "500m": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 16,
    },
}
_KEY_VALUE_HEADS = {"tiny": 1, "5m": 2, "30m": 4, "500m": 2, "1b": 4}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all variants share: optimiser, schedule, clipping and precision."""

    steps: int
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0
    batch_size: int = 8
    device: str = "cpu"
    autocast: bool = False  # bfloat16 products over float32 weights

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16) if self.autocast else nullcontext()


def build_config(size: str, vocabulary: int) -> LlamaConfig | Qwen2Config:
    """The config of a size, with tied embeddings: Qwen2 from 500m on, Llama below."""
    return (Qwen2Config if size in ("500m", "1b") else LlamaConfig)(
        vocab_size=vocabulary,
        num_key_value_heads=_KEY_VALUE_HEADS[size],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **SHAPES[size],
    )


def build_model(
    size: str, vocabulary: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """A fresh language model, always with the same weights."""
    config = build_config(size, vocabulary)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype)


def build_reward_model(size: str, vocabulary: int) -> PreTrainedModel:
    """A fresh sequence classifier with one label, always with the same weights."""
    config = build_config(size, vocabulary)
    config.num_labels = 1
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config)


class Loop:
    """A model, fused AdamW with a linear schedule, clipping; subclasses say how a batch becomes a loss."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        self.model, self.recipe = copy.deepcopy(model), recipe
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, weight_decay=0.0, fused=True
        )
        self._step = 0

    def loss(self, rows: Sequence[Row]) -> Tensor:
        raise TypeError("Loop has no loss of its own. Use Bare or Padded.")

    def step(self, rows: Sequence[Row]) -> Tensor:
        """One optimiser step on the rows of a batch; returns its loss, detached."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * (1 - self._step / self.recipe.steps)
        with self.recipe.precision():
            loss = self.loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._step += 1
        return loss.detach()


class Bare(Loop):
    """Real tokens in one flat row, attention per sequence, logits at the positions that predict completions."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        self.model.set_attn_implementation(BARE_ATTENTION)

    def loss(self, rows: Sequence[Row]) -> Tensor:
        device = self.recipe.device
        lengths = [len(row["input_ids"]) for row in rows]
        ids = torch.tensor([token for row in rows for token in row["input_ids"]])
        trained = torch.tensor([flag for row in rows for flag in row["completion_mask"]])
        predicting = trained[1:].nonzero()[:, 0]
        positions = torch.cat([torch.arange(length) for length in lengths])
        ids, positions, predicting = (part.to(device, non_blocking=True) for part in (ids, positions, predicting))
        bounds = _bounds(lengths, device)
        hidden = self.model.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, bare=bounds
        ).last_hidden_state[0]
        return F.cross_entropy(self.model.lm_head(hidden[predicting]).float(), ids[predicting + 1])


class Padded(Loop):
    """Rows padded to the longest, logits everywhere, the model's own loss."""

    def loss(self, rows: Sequence[Row]) -> Tensor:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        batch = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(part) for part in ids], batch_first=True),
            "labels": pad_sequence([_labels(row) for row in rows], batch_first=True, padding_value=IGNORED),
        }
        batch = {name: value.to(self.recipe.device, non_blocking=True) for name, value in batch.items()}
        return self.model(**batch, use_cache=False).loss


VARIANTS: dict[str, type[Loop]] = {"bare": Bare, "padded": Padded}


def _labels(row: Row) -> Tensor:
    mask = torch.tensor(row["completion_mask"])
    return torch.tensor(row["input_ids"]).masked_fill(mask == 0, IGNORED)


@dataclass(frozen=True, slots=True)
class _Bounds:
    lengths: list[int]
    offsets: Tensor  # int32 (sequences + 1,)


def _bounds(lengths: list[int], device: str) -> _Bounds:
    offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32, non_blocking=True)
    return _Bounds(lengths, offsets)


def _variable_length(query: Tensor, key: Tensor, value: Tensor, bare: _Bounds, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups, longest = query.shape[1] // key.shape[1], max(bare.lengths)
    parts = (query, repeat_kv(key, groups), repeat_kv(value, groups))
    query, key, value = (part[0].transpose(0, 1).to(torch.bfloat16).contiguous() for part in parts)
    known = inspect.signature(varlen_attn).parameters  # torch 2.10 says is_causal, later ones window_size
    options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if scaling is not None and "scale" in known:
        options["scale"] = scaling
    return varlen_attn(query, key, value, bare.offsets, bare.offsets, longest, longest, **options)[None]


def _bare_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, bare: _Bounds,
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention of each sequence over itself: one call per sequence, or one variable-length kernel on a GPU."""
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda:
        return _variable_length(query, key, value, bare, scaling), None
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped).transpose(1, 2)
        for q, k, v in zip(*(part.split(bare.lengths, dim=2) for part in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=1), None


# No mask function under this name: transformers then builds no mask.
AttentionInterface.register(BARE_ATTENTION, _bare_attention)
