"""Stage 3 of StackLLaMA: train an adapter by PPO against the reward model, which the model without the adapter holds back.

    accelerate launch examples/research_projects/stack_llama/scripts/rl_training.py --log_with wandb --model_name llama-se-merged \
        --reward_model_name llama-se-rm-merged --tokenizer_name huggyllama/llama-7b --save_freq 100 --output_max_length 128 \
        --batch_size 8 --gradient_accumulation_steps 8 --batched_gen true --ppo_epochs 4 --seed 0 --learning_rate 1.4e-5 \
        --early_stopping true --output_dir llama-se-rl

Rows have a `question`. `--load_in_8bit` quantises the base.
"""

from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import Adafactor, AutoTokenizer, pipeline

from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, TrlParser
from trl.core import LengthSampler


@dataclass
class Arguments:
    """Models, data and generation; `PPOConfig` has the rest."""

    reward_model_name: str = field(default="", metadata={"help": "Merged reward model of stage 2."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer. None: model_name."})
    dataset_name: str = field(default="lvwerra/stack-exchange-paired", metadata={"help": "Rows with questions."})  # fmt: skip
    subset: str = field(default="data/rl", metadata={"help": "Folder of the data set; '' for all of it."})
    max_question_tokens: int = field(default=512, metadata={"help": "Longer questions are left out."})
    output_min_length: int = field(default=32, metadata={"help": "Shortest length that is drawn for answers."})
    output_max_length: int = field(default=128, metadata={"help": "Longest length of an answer."})
    reward_baseline: float = field(default=0.0, metadata={"help": "Subtracted from every reward."})
    batched_gen: bool = field(default=False, metadata={"help": "Generate 4 answers at once instead of 1."})
    adafactor: bool = field(default=False, metadata={"help": "Use Adafactor instead of Adam."})
    load_in_8bit: bool = field(default=False, metadata={"help": "Quantise the base to 8 bits."})
    save_freq: int | None = field(default=None, metadata={"help": "Steps between saved adapters."})
    output_dir: str = field(default="runs/stack_llama", metadata={"help": "Folder for the adapter."})


if __name__ == "__main__":
    parser = TrlParser((Arguments, PPOConfig))
    parser.set_defaults(
        learning_rate=1.4e-5, batch_size=32, mini_batch_size=1, gradient_accumulation_steps=4, target_kl=0.1
    )
    args, config = parser.parse_args_and_config()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name or config.model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        query = f"Question: {row['question']}\n\nAnswer: "
        return {"query": query, "input_ids": tokenizer(query)["input_ids"]}

    rows: Any = load_dataset(args.dataset_name, data_dir=args.subset or None, split="train")
    rows = rows.map(tokenize, remove_columns=rows.column_names)
    rows = rows.filter(lambda row: len(row["input_ids"]) <= args.max_question_tokens)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        config.model_name,
        peft_config=LoraConfig(r=16, lora_alpha=32, bias="none", task_type="CAUSAL_LM"),
        **({"load_in_8bit": True} if args.load_in_8bit else {}),
    )
    optimizer = None
    if args.adafactor:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = Adafactor(
            trained, lr=config.learning_rate, scale_parameter=False, relative_step=False, warmup_init=False
        )
    trainer = PPOTrainer(config, model, tokenizer=tokenizer, dataset=rows, optimizer=optimizer)
    judge = pipeline(
        "sentiment-analysis",
        model=args.reward_model_name,
        device=trainer.accelerator.device,
        top_k=None,
        function_to_apply="none",
    )
    lengths = LengthSampler(args.output_min_length, args.output_max_length)
    means, kls = [], []
    batches = islice(chain.from_iterable(repeat(trainer.dataloader)), config.steps)  # as many passes as that takes
    for step, batch in enumerate(batches, start=1):
        responses = trainer.generate(
            batch["input_ids"],
            batch_size=4 if args.batched_gen else 1,
            return_prompt=False,
            length_sampler=lengths,
            do_sample=True,
            top_k=0,
            top_p=1.0,
        )
        batch["response"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
        texts = [query + answer for query, answer in zip(batch["query"], batch["response"], strict=True)]
        scores = [found[0]["score"] - args.reward_baseline for found in judge(texts)]
        stats = trainer.step(batch["input_ids"], responses, [torch.tensor(score) for score in scores])
        trainer.log_stats(stats, batch, [torch.tensor(score) for score in scores])
        means.append(sum(scores) / len(scores))
        kls.append(stats["objective/kl"])
        if args.save_freq and step % args.save_freq == 0:
            trainer.save_pretrained(f"{args.output_dir}/step_{step}")
    few = max(1, len(means) // 5)
    first, last = sum(means[:few]) / few, sum(means[-few:]) / few
    print(
        f"score of the reward model: {first:.3f} -> {last:.3f} over {len(means)} steps, KL at the end {kls[-1]:.3f} nats"
    )
    trainer.save_pretrained(args.output_dir)
