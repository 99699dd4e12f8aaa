"""How many floating-point operations a step needs, whatever it spends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.data import Row

PEAK_FLOPS = 790e12  # dense bfloat16 products of an H200, as measured, per second


def useful_flops(config: Any, rows: Sequence[Row]) -> float:
    """Operations of one forward and backward pass over real tokens, with logits of completions only.

    Two per multiply-add, backward twice the forward; attention is causal within each row. The same for all variants,
    so that padding and prompt logits show as lost utilisation.
    """
    return sum(
        operations(
            config,
            len(row["input_ids"]),
            pairs=len(row["input_ids"]) ** 2 / 2,
            scored=sum(row["completion_mask"]),
        )
        for row in rows
    )


def padded_flops(config: Any, rows: Sequence[Row]) -> float:
    """The same where every row is padded to the longest, attends to a whole square and has logits everywhere."""
    width = max(len(row["input_ids"]) for row in rows)
    return len(rows) * operations(config, width, pairs=width**2, scored=width)


def operations(config: Any, length: int, *, pairs: float, scored: int) -> float:
    """Forward and backward over `length` tokens with `pairs` query-key pairs and logits at `scored` positions."""
    width, layers = config.hidden_size, config.num_hidden_layers
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    weights = width * (2 * keys + 2 * queries + 3 * config.intermediate_size)
    body = layers * (length * weights + 2 * pairs * queries)
    return 3 * 2 * (body + scored * width * config.vocab_size)


def tree_operations(config: Any, prompt: int, completions: Sequence[int], *, scored: bool = True) -> float:
    """The same for completions behind one prompt, with logits of the completions if they are `scored`."""
    tokens = prompt + sum(completions)
    pairs = prompt**2 / 2 + sum(prompt * length + length**2 / 2 for length in completions)
    return operations(config, tokens, pairs=pairs, scored=sum(completions) if scored else 0)
