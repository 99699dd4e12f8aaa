"""Responses to padded queries by a model's own `generate`, with the logits they were drawn from: for loops of a user's own.

The trainers' engines take token ids without padding and give log-probs, see `trl.generation.engine`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from trl.models.padded_queries import padded_inputs
from trl.tensors.padding import pad


def generate(
    lm_backbone: nn.Module, queries: Tensor, pad_token_id: int, generation_config: GenerationConfig
) -> tuple[Tensor, Tensor]:
    """Queries `(B, P)`, padded on the left, with their responses behind them, and the logits of each response's tokens.

    `-> (B, P + T), (B, T, V)`. The queries stay as they are; logits are those after temperature and cuts. Responses are
    padded as `generation_config` says, or else with `pad_token_id`.
    """
    model: Any = lm_backbone
    inputs = padded_inputs(queries, pad_token_id)
    padding = {} if generation_config.pad_token_id is not None else {"pad_token_id": pad_token_id}
    found = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        generation_config=generation_config,
        return_dict_in_generate=True,
        output_scores=True,
        **padding,
    )
    responses = found.sequences[:, queries.shape[1] :]
    return torch.cat([queries, responses], dim=1), torch.stack(found.scores, dim=1)


@torch.no_grad()
def batch_generation(
    model: nn.Module,
    queries: Tensor,
    local_rollout_forward_batch_size: int,
    pad_token_id: int,
    generation_config: GenerationConfig,
) -> tuple[Tensor, Tensor]:
    """`generate` for a few rows at a time, padded on the right to the longest response of all; logits there are 0."""
    found = [
        generate(model, rows, pad_token_id, generation_config)
        for rows in queries.split(local_rollout_forward_batch_size)
    ]
    sequences, logits = ([row for part in parts for row in part] for parts in zip(*found, strict=True))
    return pad(sequences, padding_value=pad_token_id), pad(logits, padding_value=0)
