"""Binary classifier optimisation (BCO) on completions that are marked desirable or not.

    python examples/bco.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/kto-mix-14k \
        --output_dir bco-model

`--match_prompts true` weighs undesirable completions by their prompts (underlying-distribution matching; it needs
`pip install "trl[bco]"`). Without a model or data at hand, `python examples/bco.py --tiny --output_dir runs/bco` trains a
small Llama of random weights on sums with right and wrong answers.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from training_on_pairs import ExampleArguments, tiny_policy, train_on_pairs
from transformers import AutoModel, AutoTokenizer

from trl.experimental.bco import BCOConfig, BCOTrainer


@dataclass
class BCOArguments(ExampleArguments):
    match_prompts: bool = field(
        default=False, metadata={"help": "Weigh undesirable completions by their prompts' density ratio."}
    )
    embedding_model: str = field(
        default="nomic-ai/modernbert-embed-base", metadata={"help": "Model that embeds prompts."}
    )


def embedder(script_args: BCOArguments, device: Any) -> tuple[Any, Any]:
    """The model that embeds prompts, and its tokenizer."""
    if script_args.tiny:
        policy, tokenizer = tiny_policy()
        return policy.model, tokenizer
    name = script_args.embedding_model
    return AutoModel.from_pretrained(name).to(device).eval(), AutoTokenizer.from_pretrained(name)


def mean_embeddings(model: Any) -> Any:
    """An embedding function: the mean of a model's last hidden states over the real tokens of each prompt."""

    def embed(*, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1)

    return embed


def matching(script_args: BCOArguments, training_args: BCOConfig) -> dict[str, Any]:
    """What the trainer needs to match prompts, where it shall."""
    if not script_args.match_prompts:
        return {}
    model, tokenizer = embedder(script_args, training_args.device)
    return {"embedding_func": mean_embeddings(model), "embedding_tokenizer": tokenizer}


if __name__ == "__main__":
    train_on_pairs(BCOConfig, BCOTrainer, BCOArguments, matching)
