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
from datasets import load_dataset
from tiny_pairs import tiny_pairs, tiny_policy
from transformers import AutoModel, AutoTokenizer

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.bco import BCOConfig, BCOTrainer
from trl.scripts.model_loading import model_init_kwargs


@dataclass
class ExampleArguments(ScriptArguments):
    tiny: bool = field(
        default=False, metadata={"help": "Train a small model of random weights on built-in completions."}
    )
    match_prompts: bool = field(
        default=False, metadata={"help": "Weigh undesirable completions by their prompts' density ratio."}
    )
    embedding_model: str = field(
        default="nomic-ai/modernbert-embed-base", metadata={"help": "Model that embeds prompts."}
    )


def mean_embeddings(model: Any) -> Any:
    """An embedding function: the mean of a model's last hidden states over the real tokens of each prompt."""

    def embed(*, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1)

    return embed


def main() -> None:
    parser = TrlParser((ExampleArguments, BCOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    if script_args.tiny:
        (model, tokenizer), rows = tiny_policy(), tiny_pairs().shuffle(seed=0)
        sets = {"train": rows, "test": rows.select(range(8))}
        embedder, embedding_tokenizer = tiny_policy()[0].model, tokenizer
    else:
        model, tokenizer = model_args.model_name_or_path, None
        training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
        sets = load_dataset(script_args.dataset_name, script_args.dataset_config)
        embedder = embedding_tokenizer = None
        if script_args.match_prompts:
            embedder = AutoModel.from_pretrained(script_args.embedding_model).to(training_args.device).eval()
            embedding_tokenizer = AutoTokenizer.from_pretrained(script_args.embedding_model)
    trainer = BCOTrainer(
        model=model,
        args=training_args,
        train_dataset=sets[script_args.dataset_train_split],
        eval_dataset=sets[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        embedding_func=mean_embeddings(embedder) if script_args.match_prompts else None,
        embedding_tokenizer=embedding_tokenizer if script_args.match_prompts else None,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main()
