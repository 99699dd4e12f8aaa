"""Binary classifier optimisation (BCO) on completions that are marked desirable or not.

    python examples/scripts/bco.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/kto-mix-14k \
        --output_dir runs/bco

`--match_prompts true` weighs undesirable completions by their prompts (underlying-distribution matching; it needs
`pip install "trl[bco]"`).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.bco import BCOConfig, BCOTrainer
from trl.scripts.training import load_inputs


@dataclass
class BCOArguments(ScriptArguments):
    match_prompts: bool = field(
        default=False, metadata={"help": "Weigh undesirable completions by their prompts' density ratio."}
    )
    embedding_model: str = field(
        default="nomic-ai/modernbert-embed-base", metadata={"help": "Model that embeds prompts."}
    )


def embedding(name: str, device: Any) -> dict[str, Any]:
    """What the trainer needs to match prompts: the mean of a model's last hidden states over the tokens of each prompt."""
    model = AutoModel.from_pretrained(name).to(device).eval()

    def embed(*, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1)

    return {"embedding_func": embed, "embedding_tokenizer": AutoTokenizer.from_pretrained(name)}


if __name__ == "__main__":
    parser = TrlParser((BCOArguments, BCOConfig, ModelConfig, DatasetMixtureConfig))
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config()
    train_rows, eval_rows = load_inputs(script_args, training_args, model_args, dataset_args)

    trainer = BCOTrainer(
        model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        peft_config=get_peft_config(model_args),
        **(embedding(script_args.embedding_model, training_args.device) if script_args.match_prompts else {}),
    )
    trainer.train()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
