"""Stage 2 of StackLLaMA: an adapter that tells better answers from worse ones.

    torchrun --nnodes 1 --nproc_per_node 8 examples/research_projects/stack_llama/scripts/reward_modeling.py \
        --model_name llama-se-merged --output_dir llama-se-rm

Rows have `question`, `response_j` (better) and `response_k`. merge_peft_adapter.py makes a model of the adapter.
"""

from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl import RewardConfig, RewardTrainer, TrlParser


@dataclass
class Arguments:
    """Model and data; `RewardConfig` has the rest."""

    model_name: str = field(default="", metadata={"help": "Model of stage 1."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Its tokenizer. None: model_name."})
    dataset_name: str = field(default="lvwerra/stack-exchange-paired", metadata={"help": "Rows to train on."})
    subset: str = field(default="data/reward", metadata={"help": "Folder of the data set; '' for all of it."})
    train_subset: int = field(default=100_000, metadata={"help": "Rows to train on; 0 for all."})
    eval_subset: int = field(default=50_000, metadata={"help": "Rows of data/evaluation to evaluate on."})


def pair(row: dict[str, Any]) -> dict[str, str]:
    """Both answers behind the question."""
    texts = {"chosen": row["response_j"], "rejected": row["response_k"]}
    return {name: f"Question: {row['question']}\n\nAnswer: {answer}" for name, answer in texts.items()}


def load_pairs(args: Arguments, subset: str, split: str, count: int) -> Any:
    """The first rows of a part of the data set as pairs."""
    rows: Any = load_dataset(args.dataset_name, data_dir=subset or None, split=split)
    rows = rows.select(range(min(count or len(rows), len(rows))))
    return rows.map(pair, remove_columns=rows.column_names)


if __name__ == "__main__":
    parser = TrlParser((Arguments, RewardConfig))
    parser.set_defaults(learning_rate=2e-5, max_length=512, weight_decay=0.001)
    args, training_args = parser.parse_args_and_config()
    evaluation = ("data/evaluation", "train") if args.subset else ("", "test")
    model = AutoModelForSequenceClassification.from_pretrained(args.model_name, num_labels=1)
    trainer = RewardTrainer(
        model,
        training_args,
        train_dataset=load_pairs(args, args.subset, "train", args.train_subset),
        eval_dataset=load_pairs(args, *evaluation, args.eval_subset),
        processing_class=AutoTokenizer.from_pretrained(args.tokenizer_name or args.model_name),
        peft_config=LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=32, lora_dropout=0.1),
    )
    trainer.train()
    print(f"held-out accuracy: {trainer.evaluate()['eval_accuracy']:.3f}")
    trainer.save_model(training_args.output_dir)
