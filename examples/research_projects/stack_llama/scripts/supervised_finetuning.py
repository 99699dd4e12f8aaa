"""Stage 1 of StackLLaMA: fine-tune an adapter on questions and answers of Stack Exchange, packed into rows of one length.

    torchrun --nnodes 1 --nproc_per_node 8 examples/research_projects/stack_llama/scripts/supervised_finetuning.py \
        --model_path huggyllama/llama-7b --streaming true --learning_rate 1e-5 --max_steps 5000 --output_dir llama-se

Rows have `question` and `response_j`, the better answer. merge_peft_adapter.py makes a model of the adapter.
"""

from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl import SFTConfig, SFTTrainer, TrlParser
from trl.trainer import ConstantLengthDataset


@dataclass
class Arguments:
    """Model, data and training."""

    model_path: str = field(default="", metadata={"help": "Model that is fine-tuned."})
    dataset_name: str = field(default="lvwerra/stack-exchange-paired", metadata={"help": "Rows to train on."})
    subset: str = field(default="data/finetune", metadata={"help": "Folder of the data set; '' for all of it."})
    split: str = field(default="train", metadata={"help": "Its split."})
    size_valid_set: int = field(default=4000, metadata={"help": "Rows that are kept back for evaluation."})
    streaming: bool = field(default=False, metadata={"help": "Read rows as they are needed."})
    shuffle_buffer: int = field(default=5000, metadata={"help": "Rows among which a stream is shuffled."})
    seq_length: int = field(default=1024, metadata={"help": "Tokens of a packed row."})
    max_steps: int = field(default=10000, metadata={"help": "Optimiser steps."})
    batch_size: int = field(default=4, metadata={"help": "Packed rows per device and step."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches per optimiser step."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Largest learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "How it falls."})
    num_warmup_steps: int = field(default=100, metadata={"help": "Steps until it is reached."})
    weight_decay: float = field(default=0.05, metadata={"help": "Weight decay."})
    bf16: bool = field(default=False, metadata={"help": "Compute in bfloat16."})
    no_fp16: bool = field(default=False, metadata={"help": "Do not compute in float16 either."})
    no_gradient_checkpointing: bool = field(default=False, metadata={"help": "Keep all activations."})
    seed: int = field(default=0, metadata={"help": "Of the order of rows, and of the adapter."})
    num_workers: int = field(default=0, metadata={"help": "Processes that load rows."})
    output_dir: str = field(default="./checkpoints", metadata={"help": "Folder for the adapter."})
    log_freq: int = field(default=1, metadata={"help": "Steps between logs."})
    eval_freq: int = field(default=1000, metadata={"help": "Steps between evaluations."})
    save_freq: int = field(default=1000, metadata={"help": "Steps between checkpoints."})
    use_cpu: bool = field(default=False, metadata={"help": "Train on the CPU."})
    report_to: str = field(default="none", metadata={"help": "Where metrics are logged."})


def text_of(row: dict[str, Any]) -> str:
    """A question with its better answer."""
    return f"Question: {row['question']}\n\nAnswer: {row['response_j']}"


def chars_per_token(rows: Any, tokenizer: Any, count: int = 400) -> float:
    """Characters of a token in the first rows, by which the packed data set knows how much text to read at once."""
    texts = [text_of(row) for _, row in zip(range(count), rows, strict=False)]
    return sum(map(len, texts)) / sum(len(tokenizer(text)["input_ids"]) for text in texts)


def load_rows(args: Arguments) -> tuple[Any, Any]:
    """The rows to train on, shuffled, and those kept back."""
    rows: Any = load_dataset(
        args.dataset_name, data_dir=args.subset or None, split=args.split, streaming=args.streaming
    )
    if args.streaming:
        train, kept_back = rows.skip(args.size_valid_set), rows.take(args.size_valid_set)
        return train.shuffle(buffer_size=args.shuffle_buffer, seed=args.seed), kept_back
    parts = rows.train_test_split(test_size=args.size_valid_set, seed=args.seed)
    return parts["train"], parts["test"]


if __name__ == "__main__":
    parser = TrlParser(Arguments)
    (args,) = parser.parse_args_and_config()
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    train_rows, kept_back = load_rows(args)
    ratio = chars_per_token(train_rows, tokenizer)
    print(f"{ratio:.2f} characters to a token")

    def packed(rows: Any, infinite: bool) -> ConstantLengthDataset:
        return ConstantLengthDataset(
            tokenizer,
            rows,
            formatting_func=text_of,
            infinite=infinite,
            seq_length=args.seq_length,
            chars_per_token=ratio,
            eos_token_id=tokenizer.eos_token_id,
        )

    training_args = SFTConfig(
        args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        gradient_checkpointing=not args.no_gradient_checkpointing,
        learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_scheduler_type,
        warmup_steps=args.num_warmup_steps,
        weight_decay=args.weight_decay,
        bf16=args.bf16,
        fp16=not args.no_fp16 and not args.bf16,
        seed=args.seed,
        dataloader_num_workers=args.num_workers,
        logging_steps=args.log_freq,
        eval_strategy="steps",
        eval_steps=args.eval_freq,
        save_steps=args.save_freq,
        use_cpu=args.use_cpu,
        report_to=args.report_to,
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(args.model_path),
        training_args,
        train_dataset=packed(train_rows, infinite=True),
        eval_dataset=packed(kept_back, infinite=False),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(args.output_dir)
