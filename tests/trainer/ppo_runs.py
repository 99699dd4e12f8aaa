"""Tiny step-level PPO trainers on fixed queries, responses and scores."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny import tiny_model, tiny_seq2seq
from tests.tiny_tokenizers import tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead, PPOConfig, PPOTrainer

QUERIES = [[5, 6, 7], [8, 9, 10, 11, 12], [5, 6, 7], [13, 14]]
RESPONSES = [[20, 21, 22, 23], [24, 25], [26, 27, 28, 29, 30], [31, 32, 2]]
SCORES = [0.5, -1.0, 2.0, 0.25]


def tensors(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in rows]


def batch(times: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """The four rows, or several times as many."""
    return (
        tensors(QUERIES * times),
        tensors(RESPONSES * times),
        [torch.tensor(score) for score in SCORES * times],
    )


def value_model(
    architecture: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> Any:
    """A tiny model with a value head of fixed weights and no dropout."""
    if architecture in ("t5", "bart"):
        auto, inner = (AutoModelForSeq2SeqLMWithValueHead, tiny_seq2seq(architecture, dtype=dtype, seed=seed))
    else:
        auto, inner = AutoModelForCausalLMWithValueHead, tiny_model(architecture, dtype=dtype, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_pretrained(inner, summary_dropout_prob=0.0, **options)
    model.v_head.to(dtype)
    return model


def make_trainer(
    model: Any = None, ref_model: Any = None, *, options: Any = None, tokenizer: Any = None, **config: Any
) -> PPOTrainer:
    """A trainer; `options` go to its constructor, the rest to its config. Adam with a large epsilon."""
    model = value_model() if model is None else model
    options = dict(options or {})
    if "optimizer" not in options:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        options["optimizer"] = torch.optim.Adam(trained, lr=1e-2, eps=1e-4)
    defaults: dict[str, Any] = {"batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, "seed": 3}
    tokenizer = tokenizer or tiny_tokenizer()
    return PPOTrainer(PPOConfig(**{**defaults, **config}), model, ref_model, tokenizer, **options)
