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
    width, layers = config.hidden_size, config.num_hidden_layers
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    per_layer = width * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    forward = 0.0
    for row in rows:
        length, trained = len(row["input_ids"]), sum(row["completion_mask"])
        forward += 2 * length * layers * per_layer
        forward += 2 * length**2 * queries * layers
        forward += 2 * trained * width * config.vocab_size
    return 3 * forward
